/* The scan of one sequence and block of channels, token after token, for one instruction set (see tiles.h of the recurrence). What a
 * thread works on is padded to whole vectors; tensors are not.
 */
#include "coupling.h"

/* The first `numbers` of a vector, the others zero. */
INLINE vector NAME(read)(const float *from, int numbers) {
    if (numbers >= LANES) return *(const vector *)from;
    float part[LANES] = {0};
    for (int i = 0; i < numbers; i++) part[i] = from[i];
    return *(const vector *)part;
}

INLINE void NAME(write)(float *to, vector x, int numbers) {
    if (numbers >= LANES) {
        *(vector *)to = x;
        return;
    }
    for (int i = 0; i < numbers; i++) to[i] = x[i];
}

/* Numbers of a sequence's state, zeros if it has none, and back. */
static void NAME(read_state)(const float *from, long place, int n, float *h) {
    for (int j = 0; j < n; j += LANES) *(vector *)(h + j) = from ? NAME(read)(from + place + j, n - j) : (vector){0};
}

static void NAME(write_state)(float *to, long place, int n, const float *h) {
    for (int j = 0; j < n && to; j += LANES) NAME(write)(to + place + j, *(const vector *)(h + j), n - j);
}

/* The factors e^g, or g, of `n` channels from `first` on, of one token, and with a coupling what it multiplies x by. */
static void NAME(factors)(const Scan *call, long token, long first, int n, float *factor, float *weight) {
    int each = call->decay == BY_HEAD ? (int)call->width : 1, count = n / each;
    long row = call->decay == CONSTANT ? 0 : token * (call->channels / each);
    const float *g = call->g + row + first / each;
    for (int i = 0; i < count; i += LANES) {
        vector e = NAME(read)(g + i, count - i), w = {0};
        if (call->coupling)
            e = NAME(factor_and_weight)(call->coupling, e, &w);
        else if (!call->maximum)
            e = NAME(exponential)(e);
        if (each == 1) {
            *(vector *)(factor + i) = e;
            if (call->coupling) *(vector *)(weight + i) = w;
            continue;
        }
        for (int k = 0; k < LANES && i + k < count; k++)
            for (int j = 0; j < each; j++) factor[(i + k) * each + j] = e[k], weight[(i + k) * each + j] = w[k];
    }
}

/* The larger one, NaN if one is. */
INLINE vector NAME(larger)(vector a, vector b) {
    typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4)));
    whole mask = (a >= b) | (a != a);
    return (vector)((mask & (whole)a) | (~mask & (whole)b));
}

/* The larger of h + g and x, NaN if one is; `lost` is what rounding took from the sums since the last x, which one decay after the other
 * takes to the same side.
 */
INLINE vector NAME(aged_maximum)(vector h, vector g, vector x, float *lost) {
    typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4)));
    vector sum = h + g, part = sum - h, rest = *(vector *)lost + ((h - (sum - part)) + (g - part));
    rest = (vector)((whole)rest & (rest == rest)); /* of infinities */
    vector aged = sum + rest;
    rest -= aged - sum;
    *(vector *)lost = (vector)((whole)rest & (rest == rest) & (aged >= x));
    return NAME(larger)(aged, x);
}

INLINE void NAME(prefetch_row)(const float *row, int n) {
    for (int j = 0; j < n; j += LANES) __builtin_prefetch(row + j);
}

static void NAME(scan)(const void *given, int64_t sequence, int64_t block, float *unused) {
    const Scan *call = given;
    long channels = call->channels, first = block * call->block, end = call->starts[sequence + 1];
    int n = (int)(channels - first < call->block ? channels - first : call->block);
    float h[n + LANES], factor[n + LANES], weight[n + LANES], lost[n + LANES];
    (void)unused;
    NAME(read_state)(call->initial_state, sequence * channels + first, n, h);
    memset(lost, 0, sizeof lost);
    memset(factor, 0, sizeof factor);
    memset(weight, 0, sizeof weight);
    if (call->decay == CONSTANT) NAME(factors)(call, 0, first, n, factor, weight);
    for (long t = call->starts[sequence]; t < end; t++) {
        const float *x = call->x + t * channels + first;
        float *to = call->h + t * channels + first;
        if (call->decay != CONSTANT) NAME(factors)(call, t, first, n, factor, weight);
        if (t + 1 < end) {
            NAME(prefetch_row)(x + channels, n);
            if (call->decay == BY_CHANNEL) NAME(prefetch_row)(call->g + (t + 1) * channels + first, n);
        }
        for (int j = 0; j < n; j += LANES) {
            vector before = *(vector *)(h + j), own = NAME(read)(x + j, n - j), f = *(vector *)(factor + j);
            if (call->coupling) own *= *(vector *)(weight + j);
            vector after = f * before + own;
            if (call->maximum) after = NAME(aged_maximum)(before, f, own, lost + j);
            *(vector *)(h + j) = after;
            NAME(write)(to + j, call->read_before ? before : after, n - j);
        }
    }
    NAME(write_state)(call->state, sequence * channels + first, n, h);
}

/* The gradients of a token's decays from those of its channels, `own`. */
static void NAME(decay_gradients)(const Scan *call, long token, long first, int n, const float *own, double *sums) {
    if (call->decay == CONSTANT) {
        for (int j = 0; j < n; j++) sums[j] += own[j];
        return;
    }
    int width = call->decay == BY_HEAD ? (int)call->width : 1;
    float *to = call->dg + (token * call->channels + first) / width;
    for (int j = 0; j < n && width == 1; j += LANES) NAME(write)(to + j, *(const vector *)(own + j), n - j);
    for (int head = 0; head < n / width && width > 1; head++) {
        vector sum = {0};
        for (int j = 0; j < width; j += LANES) sum += NAME(read)(own + head * width + j, width - j);
        to[head] = NAME(sum)(sum);
    }
}

/* From the last token to the first, with c the gradient that reaches a token's state from later ones:
 * dx = dh + c, dg = e^g h' dx with h' the state before, c <- e^g dx. read_before: dx = c, c <- e^g dx + dh.
 * With a coupling this dx is the gradient of w x, and h' as state_and_own has it.
 */
static void NAME(scan_backward)(const void *given, int64_t sequence, int64_t block, float *unused) {
    const Scan *call = given;
    long channels = call->channels, first = block * call->block, begin = call->starts[sequence];
    int n = (int)(channels - first < call->block ? channels - first : call->block), late = (int)call->read_before;
    float c[n + LANES], factor[n + LANES], weight[n + LANES], own[n + LANES], start[n + LANES];
    double sums[n];
    (void)unused;
    NAME(read_state)(call->d_state, sequence * channels + first, n, c);
    NAME(read_state)(call->initial_state, sequence * channels + first, n, start);
    memset(factor, 0, sizeof factor);
    memset(weight, 0, sizeof weight);
    memset(sums, 0, sizeof sums);
    if (call->decay == CONSTANT) NAME(factors)(call, 0, first, n, factor, weight);
    for (long t = call->starts[sequence + 1] - 1; t >= begin; t--) {
        long at = t * channels + first;
        const float *before = late ? call->h + at : t > begin ? call->h + at - channels : start;
        if (call->decay != CONSTANT) NAME(factors)(call, t, first, n, factor, weight);
        if (t > begin) {
            if (call->coupling) NAME(prefetch_row)(call->x + at - channels, n);
            NAME(prefetch_row)(before - (late || t > begin + 1 ? channels : 0), n);
            if (call->d_h) NAME(prefetch_row)(call->d_h + at - channels, n);
            if (call->decay == BY_CHANNEL) NAME(prefetch_row)(call->g + at - channels, n);
        }
        for (int j = 0; j < n; j += LANES) {
            vector d_h = call->d_h ? NAME(read)(call->d_h + at + j, n - j) : (vector){0};
            vector dx = *(vector *)(c + j);
            if (!late) dx += d_h;
            vector f = *(vector *)(factor + j), w = *(vector *)(weight + j), h = NAME(read)(before + j, n - j);
            vector back = f * dx;
            if (call->coupling) {
                dx *= w;
                if (call->dg) h = NAME(state_and_own)(call->coupling, h, NAME(read)(call->x + at + j, n - j), f, w);
            }
            NAME(write)(call->dx + at + j, dx, n - j);
            *(vector *)(own + j) = back * h;
            if (late) back += d_h;
            *(vector *)(c + j) = back;
        }
        if (call->dg) NAME(decay_gradients)(call, t, first, n, own, sums);
    }
    for (int j = 0; j < n && call->dg && call->decay == CONSTANT; j++) call->dg[sequence * channels + first + j] = (float)sums[j];
    NAME(write_state)(call->d_initial_state, sequence * channels + first, n, c);
}
