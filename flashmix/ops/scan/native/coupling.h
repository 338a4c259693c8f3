/* What a coupling multiplies x by, and how the gradient of the decay passes through it, for one instruction set. */

/* a where x > 0, else b. */
INLINE vector NAME(where_above)(vector x, vector a, vector b) {
    typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4)));
    whole mask = x > 0;
    return (vector)((mask & (whole)a) | (~mask & (whole)b));
}

/* The square root of x >= 0: 1 / sqrt(x) from half of its exponent by three steps of Newton's, and one of the root itself. */
INLINE vector NAME(root)(vector x) {
    typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
    vector y = (vector)(0x5f3759df - ((whole)x >> 1));
    for (int i = 0; i < 3; i++) y = y * (1.5f - 0.5f * x * y * y);
    vector root = x * y;
    return root + 0.5f * y * (x - root * root);
}

/* e^g of a log decay or a logit; `weight` is what x is multiplied by. */
INLINE vector NAME(factor_and_weight)(int64_t coupling, vector g, vector *weight) {
    vector none = {0};
    if (coupling == LOGIT) {
        vector small = NAME(exponential)(NAME(where_above)(g, -g, g)), large = 1 / (1 + small);
        small *= large;
        *weight = NAME(where_above)(g, large, small);
        return NAME(where_above)(g, small, large);
    }
    vector power, y = NAME(reduced)(g, &power), far = g + 87.3f;
    vector factor = NAME(exponential)(g), rest = NAME(where_above)(-far, none + 1, (1 - power) - y * power);
    *weight = coupling == ROOT ? NAME(root)(rest * (1 + factor)) : rest;
    return factor;
}

/* What the gradient of e^g h is multiplied by for that of g: the state before and, with a coupling, what the weight adds to it. */
INLINE vector NAME(state_and_own)(int64_t coupling, vector h, vector x, vector factor, vector weight) {
    if (coupling == COMPLEMENT) return h - x;
    if (coupling == LOGIT) return weight * (x - h);
    vector inverse = 1 / weight, steepest = (vector){0} + 2000; /* STEEPEST of call.py */
    return h - factor * NAME(where_above)(steepest - inverse, inverse, steepest) * x;
}
