/* The selective scan of one sequence and block of channels of a group, token after token, for one instruction set (see tiles.h of the
 * recurrence). LANES channels lie side by side in a vector, and their states in a vector each: [channels / LANES, states, LANES].
 */

/* The channels of a block: from `first` on, `count` of them, `lanes` with those that fill the last vector, in group `group`; it is part
 * `part` of its group.
 */
typedef struct {
    long first, count, lanes, group, part;
} NAME(Share);

static NAME(Share) NAME(share)(const Selective *call, int64_t block) {
    long width = call->channels / call->groups, parts = (width + call->block - 1) / call->block;
    NAME(Share) s = {.group = block / parts, .part = block % parts};
    long before = s.part * call->block;
    s.first = s.group * width + before;
    s.count = width - before < call->block ? width - before : call->block;
    s.lanes = (s.count + LANES - 1) / LANES * LANES;
    return s;
}

/* Numbers of channels [count, S] as vectors [lanes / LANES, S, LANES], zeros if there are none, and back. */
static void NAME(by_state)(const float *from, NAME(Share) own, long S, float *to) {
    for (long c = 0; c < own.lanes; c++)
        for (long s = 0; s < S; s++)
            to[(c / LANES * S + s) * LANES + c % LANES] = from && c < own.count ? from[c * S + s] : 0;
}

static void NAME(by_channel)(const float *from, NAME(Share) own, long S, float *to) {
    for (long c = 0; c < own.count && to; c++)
        for (long s = 0; s < S; s++) to[c * S + s] = from[(c / LANES * S + s) * LANES + c % LANES];
}

static void NAME(selective)(const void *given, int64_t sequence, int64_t block, float *scratch) {
    const Selective *call = given;
    NAME(Share) own = NAME(share)(call, block);
    long D = call->channels, S = call->states, place = (sequence * D + own.first) * S, begin = call->starts[sequence];
    float *h = scratch, *A = h + own.lanes * S;
    NAME(by_state)(call->A + own.first * S, own, S, A);
    NAME(by_state)(call->initial_state ? call->initial_state + place : 0, own, S, h);
    for (long t = begin; t < call->starts[sequence + 1]; t++) {
        const float *B = call->B + (t * call->groups + own.group) * S, *C = call->C + (t * call->groups + own.group) * S;
        long chunk = call->chunk_starts[sequence] + (t - begin) / CHUNK, at = t * D + own.first;
        if (call->kept && (t - begin) % CHUNK == 0)
            NAME(by_channel)(h, own, S, call->kept + (chunk * D + own.first) * S);
        for (long c = 0; c < own.count; c += LANES) {
            int n = (int)(own.count - c);
            vector dt = NAME(read)(call->dt + at + c, n), write = dt * NAME(read)(call->u + at + c, n), y = {0};
            vector *state = (vector *)(h + c * S);
            const vector *a = (const vector *)(A + c * S);
            for (long s = 0; s < S; s++) {
                vector now = NAME(exponential)(dt * a[s]) * state[s] + write * B[s];
                state[s] = now;
                y += now * C[s];
            }
            NAME(write)(call->y + at + c, y, n);
        }
    }
    NAME(by_channel)(h, own, S, call->state ? call->state + place : 0);
}

/* The states before the tokens of a chunk and their factors, `[tokens, S, LANES]` of LANES channels, from that before the first one. */
static void NAME(recompute)(const Selective *call, int n, long tokens, long at, const float *B, const float *first,
                            const vector *a, vector *before, vector *factor) {
    long S = call->states;
    memcpy(before, first, sizeof(vector) * S);
    for (long i = 0; i < tokens; i++, at += call->channels, B += call->groups * S) {
        vector dt = NAME(read)(call->dt + at, n), write = dt * NAME(read)(call->u + at, n);
        for (long s = 0; s < S; s++) {
            vector e = NAME(exponential)(dt * a[s]);
            factor[i * S + s] = e;
            if (i + 1 < tokens) before[(i + 1) * S + s] = e * before[i * S + s] + write * B[s];
        }
    }
}

/* From the last token to the first, with c the gradient that reaches a token's state from later ones [portable.py, backward]. */
static void NAME(selective_backward)(const void *given, int64_t sequence, int64_t block, float *scratch) {
    const Selective *call = given;
    NAME(Share) own = NAME(share)(call, block);
    long D = call->channels, S = call->states, place = (sequence * D + own.first) * S, begin = call->starts[sequence];
    long end = call->starts[sequence + 1], row = call->groups * S, all = call->starts[call->sequences];
    float *c = scratch, *A = c + own.lanes * S, *dA = A + own.lanes * S, *kept = dA + own.lanes * S;
    vector *before = (vector *)(kept + own.lanes * S), *factor = before + CHUNK * S, *dB = factor + CHUNK * S, *dC = dB + CHUNK * S;
    vector *d_a = dC + CHUNK * S; /* of a chunk: one sum of all tokens would err more */
    NAME(by_state)(call->A + own.first * S, own, S, A);
    NAME(by_state)(call->d_state ? call->d_state + place : 0, own, S, c);
    memset(dA, 0, sizeof(float) * own.lanes * S);
    for (long chunk = (end - begin + CHUNK - 1) / CHUNK - 1; chunk >= 0; chunk--) {
        long t = begin + chunk * CHUNK, tokens = end - t < CHUNK ? end - t : CHUNK;
        const float *B = call->B + t * row + own.group * S, *C = call->C + t * row + own.group * S;
        NAME(by_state)(call->kept + ((call->chunk_starts[sequence] + chunk) * D + own.first) * S, own, S, kept);
        memset(dB, 0, sizeof(vector) * 2 * CHUNK * S);
        for (long j = 0; j < own.count; j += LANES) {
            vector *a = (vector *)(A + j * S), *back = (vector *)(c + j * S);
            int n = (int)(own.count - j);
            memset(d_a, 0, sizeof(vector) * S);
            NAME(recompute)(call, n, tokens, t * D + own.first + j, B, kept + j * S, a, before, factor);
            for (long i = tokens - 1; i >= 0; i--) {
                long at = (t + i) * D + own.first + j, o = i * S;
                vector dt = NAME(read)(call->dt + at, n), u = NAME(read)(call->u + at, n), write = dt * u;
                vector dy = call->d_y ? NAME(read)(call->d_y + at, n) : (vector){0}, dx = {0}, rate = {0};
                for (long s = 0; s < S; s++) {
                    vector now = back[s] + dy * C[i * row + s], decayed = factor[o + s] * before[o + s];
                    dC[o + s] += dy * (decayed + write * B[i * row + s]);
                    dB[o + s] += write * now;
                    dx += now * B[i * row + s];
                    decayed *= now;
                    rate += a[s] * decayed;
                    d_a[s] += dt * decayed;
                    back[s] = factor[o + s] * now;
                }
                NAME(write)(call->du + at, dt * dx, n);
                NAME(write)(call->ddt + at, u * dx + rate, n);
            }
            for (long s = 0; s < S; s++) *(vector *)(dA + (j / LANES * S + s) * LANES) += d_a[s];
        }
        for (long i = 0; i < tokens; i++) {
            long to = (own.part * all + t + i) * row + own.group * S;
            for (long s = 0; s < S; s++)
                call->dB[to + s] = NAME(sum)(dB[i * S + s]), call->dC[to + s] = NAME(sum)(dC[i * S + s]);
        }
    }
    NAME(by_channel)(dA, own, S, call->dA + place);
    NAME(by_channel)(c, own, S, call->d_initial_state ? call->d_initial_state + place : 0);
}
