/* The scan of complex numbers, for one instruction set: pairs of floats (real, imaginary) that lie in a vector side by side. `channels`,
 * `first` and `n` count floats. `g` is real with one number a pair (REAL), complex (TURNING), or, constant, e^g itself (FACTORS).
 */

#define SWAPPED 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14
#define EVEN 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30
#define ODD 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31
#define LOWER 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define UPPER 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31

/* f h, or with `sign` -1 conj(f) h: the real part times h, and the imaginary part times i h. */
INLINE vector NAME(rotated)(vector f, vector h, float sign) {
    const vector i = {-1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1};
    vector real = SHUFFLE(f, f, LOW1), imaginary = SHUFFLE(f, f, HIGH1);
    return real * h + sign * i * imaginary * SHUFFLE(h, h, SWAPPED);
}

/* cos x and sin x, for |x| up to 8192: x = k pi/2 + r, polynomials in r up to pi/4. */
INLINE void NAME(direction)(vector x, vector *cosine, vector *sine) {
    typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4), may_alias));
    const float turns = 12582912; /* 3 2^22: what is added to it is rounded to a whole number */
    vector k = (x * 0.636619772f + turns) - turns;
    vector r = ((x - k * 1.5703125f) - k * 4.837512969970703125e-4f) - k * 7.54978995489188e-8f, z = r * r;
    vector s = r + r * z * (-1.6666654611e-1f + z * (8.3321608736e-3f - z * 1.9515295891e-4f));
    vector c = 1 - z * 0.5f + z * z * (4.166664568298827e-2f + z * (-1.388731625493765e-3f + z * 2.443315711809948e-5f));
    /* for k = 0, 1, 2, 3 cos x is c, -s, -c, s, and sin x is s, c, -s, -c */
    whole quarter = __builtin_convertvector(k, whole), odd = -(quarter & 1);
    whole a = (odd & (whole)s) | (~odd & (whole)c), b = (odd & (whole)c) | (~odd & (whole)s);
    *cosine = (vector)(a ^ ((quarter + 1) & 2) << 30);
    *sine = (vector)(b ^ (quarter & 2) << 30);
}

/* The factors e^g of `n` floats from `first` on, of one token; two vectors at a time. */
static void NAME(turning_factors)(const Scan *call, long token, long first, int n, float *factor) {
    if (call->turning == FACTORS) {
        memcpy(factor, call->g + first, sizeof(float) * n);
        return;
    }
    long at = (call->decay == CONSTANT ? 0 : token * call->channels) + first;
    vector far = {0};
    for (int i = 0; i < n; i += 2 * LANES) {
        const float *g = call->g + at + i;
        vector real, cosine, sine = {0};
        if (call->turning == TURNING) {
            vector low = NAME(read)(g, n - i), high = NAME(read)(g + LANES, n - i - LANES), angle;
            real = SHUFFLE(low, high, EVEN), angle = SHUFFLE(low, high, ODD);
            NAME(direction)(angle, &cosine, &sine);
            vector size = NAME(larger)(angle, -angle);
            far += NAME(larger)(size, (vector){0} + 8192) - 8192;
        } else {
            real = NAME(read)(call->g + (at + i) / 2, (n - i) / 2), cosine = (vector){0} + 1;
        }
        real = NAME(exponential)(real), cosine *= real, sine *= real;
        *(vector *)(factor + i) = SHUFFLE(cosine, sine, LOWER);
        *(vector *)(factor + i + LANES) = SHUFFLE(cosine, sine, UPPER);
    }
    if (NAME(sum)(far) > 0)
        for (int i = 0; i < n; i += 2) {
            float size = expf(call->g[at + i]), angle = call->g[at + i + 1];
            factor[i] = size * cosf(angle), factor[i + 1] = size * sinf(angle);
        }
}

static void NAME(scan_complex)(const void *given, int64_t sequence, int64_t block, float *unused) {
    const Scan *call = given;
    long channels = call->channels, first = block * call->block, end = call->starts[sequence + 1];
    int n = (int)(channels - first < call->block ? channels - first : call->block);
    float h[n + LANES], factor[n + 2 * LANES];
    (void)unused;
    NAME(read_state)(call->initial_state, sequence * channels + first, n, h);
    if (call->decay == CONSTANT) NAME(turning_factors)(call, 0, first, n, factor);
    for (long t = call->starts[sequence]; t < end; t++) {
        const float *x = call->x + t * channels + first;
        float *to = call->h + t * channels + first;
        if (call->decay != CONSTANT) NAME(turning_factors)(call, t, first, n, factor);
        if (t + 1 < end) {
            NAME(prefetch_row)(x + channels, n);
            if (call->decay != CONSTANT && call->turning) NAME(prefetch_row)(call->g + (t + 1) * channels + first, n);
        }
        for (int j = 0; j < n; j += LANES) {
            vector before = *(vector *)(h + j), own = NAME(read)(x + j, n - j);
            vector after = NAME(rotated)(*(vector *)(factor + j), before, 1) + own;
            *(vector *)(h + j) = after;
            NAME(write)(to + j, call->read_before ? before : after, n - j);
        }
    }
    NAME(write_state)(call->state, sequence * channels + first, n, h);
}

/* As scan_backward with conjugates: c <- conj(e^g) dx and dg = conj(e^g h') dx, complex also for a real g. */
static void NAME(scan_complex_backward)(const void *given, int64_t sequence, int64_t block, float *unused) {
    const Scan *call = given;
    long channels = call->channels, first = block * call->block, begin = call->starts[sequence];
    int n = (int)(channels - first < call->block ? channels - first : call->block), late = (int)call->read_before;
    float c[n + LANES], factor[n + 2 * LANES], start[n + LANES];
    double sums[n];
    (void)unused;
    NAME(read_state)(call->d_state, sequence * channels + first, n, c);
    NAME(read_state)(call->initial_state, sequence * channels + first, n, start);
    memset(sums, 0, sizeof sums);
    if (call->decay == CONSTANT) NAME(turning_factors)(call, 0, first, n, factor);
    for (long t = call->starts[sequence + 1] - 1; t >= begin; t--) {
        long at = t * channels + first;
        const float *before = late ? call->h + at : t > begin ? call->h + at - channels : start;
        if (call->decay != CONSTANT) NAME(turning_factors)(call, t, first, n, factor);
        for (int j = 0; j < n; j += LANES) {
            vector d_h = call->d_h ? NAME(read)(call->d_h + at + j, n - j) : (vector){0};
            vector dx = *(vector *)(c + j);
            if (!late) dx += d_h;
            vector back = NAME(rotated)(*(vector *)(factor + j), dx, -1);
            vector dg = NAME(rotated)(NAME(read)(before + j, n - j), back, -1);
            NAME(write)(call->dx + at + j, dx, n - j);
            if (call->dg && call->decay != CONSTANT) NAME(write)(call->dg + at + j, dg, n - j);
            for (int i = 0; call->dg && call->decay == CONSTANT && i < LANES && j + i < n; i++) sums[j + i] += dg[i];
            if (late) back += d_h;
            *(vector *)(c + j) = back;
        }
    }
    for (int j = 0; j < n && call->dg && call->decay == CONSTANT; j++) call->dg[sequence * channels + first + j] = (float)sums[j];
    NAME(write_state)(call->d_initial_state, sequence * channels + first, n, c);
}

#undef SWAPPED
#undef EVEN
#undef ODD
#undef LOWER
#undef UPPER
