/* The preconditioner of keys of one sequence and block of heads, token after token, for one instruction set (see tiles.h of the recurrence).
 * What a thread works on is padded to whole vectors, head by head; tensors are not.
 */

/* The logarithm of a normal number, to a unit in the last place; NaN of 0, infinity and below 0, where the powers below are NaN. */
INLINE vector NAME(logarithm)(vector x) {
    typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4)));
    whole bits = (whole)x, fits = (bits > 0) & (bits < 0x7f800000), power = (bits >> 23) - 126, lower;
    vector m = (vector)((bits & 0x007fffff) | 0x3f000000); /* between 1/2 and 1 */
    lower = m < 0.707106781f;
    power += lower; /* -1 where it is doubled */
    m = m + (vector)(lower & (whole)m) - 1;
    vector z = m * m, n = __builtin_convertvector(power, vector);
    vector y = m * 7.0376836292e-2f - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f, y = y * m - 1.2420140846e-1f, y = y * m + 1.4249322787e-1f, y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f, y = y * m - 2.4999993993e-1f, y = y * m + 3.3333331174e-1f;
    y = y * m * z - n * 2.12194440e-4f - z * 0.5f;
    return (vector)((whole)(m + y + n * 0.693359375f) | ~fits);
}

/* A head's numbers of one token, from its curvature: log(A + eps) - log_scale, 1 + its size, and the power of the bound. */
typedef struct {
    vector r, size, strength;
} NAME(Strength);

INLINE NAME(Strength) NAME(strength)(const Preconditioner *call, vector A, float log_scale) {
    typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4)));
    NAME(Strength) s;
    s.r = NAME(logarithm)(A + (float)call->eps) - log_scale;
    s.size = (vector)((whole)s.r & 0x7fffffff) + 1;
    s.strength = NAME(exponential)((float)call->power * s.r / s.size);
    return s;
}

/* Decays e^g of the heads of one token. */
static void NAME(head_factors)(const float *g, int count, float *factor) {
    for (int h = 0; h < count; h += LANES) *(vector *)(factor + h) = NAME(exponential)(NAME(read)(g + h, count - h));
}

static void NAME(preconditioner)(const void *given, int64_t sequence, int64_t block, float *unused) {
    const Preconditioner *call = given;
    long H = call->heads, K = call->width, Kp = (K + LANES - 1) / LANES * LANES, first = block * call->block;
    int count = (int)(H - first < call->block ? H - first : call->block);
    float A[count * Kp], factor[count + LANES];
    (void)unused;
    for (int h = 0; h < count; h++) NAME(read_state)(call->start, (sequence * H + first + h) * K, (int)K, A + h * Kp);
    for (long t = call->starts[sequence]; t < call->starts[sequence + 1]; t++) {
        NAME(head_factors)(call->g + t * H + first, count, factor);
        for (int h = 0; h < count; h++) {
            long row = t * H + first + h;
            float weight = call->weight[row], scale = call->log_scale[first + h];
            for (int j = 0; j < K; j += LANES) {
                int n = (int)K - j;
                vector k = NAME(read)(call->k + row * K + j, n), *state = (vector *)(A + h * Kp + j);
                vector now = factor[h] * *state + weight * k * k;
                *state = now;
                if (call->kept) NAME(write)(call->kept + row * K + j, now, n);
                NAME(write)(call->out + row * K + j, k * NAME(strength)(call, now, scale).strength, n);
            }
        }
    }
    for (int h = 0; h < count; h++) NAME(write_state)(call->last, (sequence * H + first + h) * K, (int)K, A + h * Kp);
}

/* From the last token to the first, with c the gradient that reaches a curvature from later ones: dr = -dy y log(bound) / (1 + |r|)^2,
 * dA = dr / (A + eps) + c, dk = dy M + 2 weight k dA, dweight = sum k^2 dA, dg = e^g sum A' dA with A' the one before, c <- e^g dA.
 */
static void NAME(preconditioner_backward)(const void *given, int64_t sequence, int64_t block, float *unused) {
    const Preconditioner *call = given;
    long H = call->heads, K = call->width, Kp = (K + LANES - 1) / LANES * LANES, first = block * call->block;
    long begin = call->starts[sequence];
    int count = (int)(H - first < call->block ? H - first : call->block);
    float c[count * Kp], start[count * Kp], factor[count + LANES];
    double scales[count];
    (void)unused;
    memset(scales, 0, sizeof scales);
    for (int h = 0; h < count; h++) {
        NAME(read_state)(call->d_last, (sequence * H + first + h) * K, (int)K, c + h * Kp);
        NAME(read_state)(call->start, (sequence * H + first + h) * K, (int)K, start + h * Kp);
    }
    for (long t = call->starts[sequence + 1] - 1; t >= begin; t--) {
        NAME(head_factors)(call->g + t * H + first, count, factor);
        for (int h = 0; h < count; h++) {
            long row = t * H + first + h;
            vector d_weight = {0}, d_g = {0}, d_scale = {0};
            for (int j = 0; j < K; j += LANES) {
                int n = (int)K - j;
                vector k = NAME(read)(call->k + row * K + j, n), A = NAME(read)(call->kept + row * K + j, n);
                vector dy = {0}, dr, dA, *carry = (vector *)(c + h * Kp + j);
                vector before = t > begin ? NAME(read)(call->kept + (row - H) * K + j, n) : *(vector *)(start + h * Kp + j);
                if (call->d_out) dy = NAME(read)(call->d_out + row * K + j, n);
                NAME(Strength) s = NAME(strength)(call, A, call->log_scale[first + h]);
                dr = dy * k * s.strength * (float)call->power / (s.size * s.size);
                dA = dr / (A + (float)call->eps) + *carry;
                NAME(write)(call->dk + row * K + j, dy * s.strength + 2 * call->weight[row] * k * dA, n);
                if (n < LANES)  /* the numbers beyond the head: 0 / eps */
                    for (int i = n; i < LANES; i++) dA[i] = dr[i] = 0;
                d_weight += k * k * dA, d_g += before * dA, d_scale += dr;
                *carry = factor[h] * dA;
            }
            call->dweight[row] = NAME(sum)(d_weight);
            call->dg[row] = factor[h] * NAME(sum)(d_g);
            scales[h] -= NAME(sum)(d_scale);
        }
    }
    for (int h = 0; h < count; h++) {
        call->dscale[sequence * H + first + h] = (float)scales[h];
        NAME(write_state)(call->d_start, (sequence * H + first + h) * K, (int)K, c + h * Kp);
    }
}
