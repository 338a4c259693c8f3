/* RWKV-4's averages of one sequence and block of channels, token after token, for one instruction set (see tiles.h of the recurrence).
 * What a thread works on is padded to whole vectors; tensors are not. `m + w` is `peak + n w`, with the key that `m` was last and the tokens
 * since then: rounded once, where a sum of one decay after the other errs by as many roundings, all to the same side.
 */

typedef int32_t NAME(Mask) __attribute__((vector_size(4 * LANES), aligned(4)));

/* The factors of two terms e^x and e^y divided by the larger one, its logarithm, and where it is the first. */
typedef struct {
    vector first, second, largest;
    NAME(Mask) is_first;
} NAME(Pair);

INLINE vector NAME(chosen)(NAME(Mask) mask, vector x, vector y) {
    return (vector)((mask & (NAME(Mask))x) | (~mask & (NAME(Mask))y));
}

INLINE NAME(Pair) NAME(weights)(vector x, vector y) {
    vector least = {0};
    least -= 3.4028234e38f;
    NAME(Pair) p = {.is_first = x >= y, .largest = NAME(larger)(x, y)};
    vector base = NAME(larger)(p.largest, least), one = {0}, other;
    one += 1;
    other = NAME(exponential)(NAME(chosen)(p.is_first, y, x) - base); /* of the larger one e^0: one exponential for two factors */
    p.first = NAME(chosen)(p.is_first, one, other);
    p.second = NAME(chosen)(p.is_first, other, one);
    return p;
}

static void NAME(wkv)(const void *given, int64_t sequence, int64_t block, float *unused) {
    const Wkv *call = given;
    long channels = call->channels, first = block * call->block, all = call->tokens * channels;
    int size = (int)(channels - first < call->block ? channels - first : call->block);
    long place = sequence * channels + first;
    float a[size + LANES], b[size + LANES], m[size + LANES], w[size + LANES], u[size + LANES];
    float peak[size + LANES], since[size + LANES];
    (void)unused;
    NAME(read_state)(call->a, place, size, a);
    NAME(read_state)(call->b, place, size, b);
    NAME(read_state)(call->m, place, size, m);
    NAME(read_state)(call->m, place, size, peak);
    memset(since, 0, sizeof since);
    NAME(read_state)(call->w, first, size, w);
    NAME(read_state)(call->u, first, size, u);
    for (long t = call->starts[sequence]; t < call->starts[sequence + 1]; t++) {
        long at = t * channels + first;
        for (int j = 0; j < size; j += LANES) {
            int left = size - j;
            vector k = NAME(read)(call->k + at + j, left), v = NAME(read)(call->v + at + j, left);
            vector A = *(vector *)(a + j), B = *(vector *)(b + j), M = *(vector *)(m + j), n = *(vector *)(since + j) + 1;
            vector aged = n * *(vector *)(w + j) + *(vector *)(peak + j), zero = {0};
            NAME(Pair) out = NAME(weights)(M, k + *(vector *)(u + j)), next = NAME(weights)(aged, k);
            *(vector *)(peak + j) = NAME(chosen)(next.is_first, *(vector *)(peak + j), next.largest);
            *(vector *)(since + j) = NAME(chosen)(next.is_first, n, zero);
            NAME(write)(call->out + at + j, (out.first * A + out.second * v) / (out.first * B + out.second), left);
            *(vector *)(a + j) = next.first * A + next.second * v;
            *(vector *)(b + j) = next.first * B + next.second;
            *(vector *)(m + j) = next.largest;
            if (!call->kept) continue;
            NAME(write)(call->kept + at + j, A, left);
            NAME(write)(call->kept + all + at + j, B, left);
            NAME(write)(call->kept + 2 * all + at + j, M, left);
        }
    }
    NAME(write_state)(call->last_a, place, size, a);
    NAME(write_state)(call->last_b, place, size, b);
    NAME(write_state)(call->last_m, place, size, m);
}

/* From the last token to the first, with da and db the gradients that reach a token's sums from later ones. With n and d the gradients of
 * the average's numerator and denominator: dv = q n + W da, dk = q (v n + d) + W (v da + db), and the sums before get p n + F da, p d + F db.
 */
static void NAME(wkv_backward)(const void *given, int64_t sequence, int64_t block, float *unused) {
    const Wkv *call = given;
    long channels = call->channels, first = block * call->block, all = call->tokens * channels;
    int size = (int)(channels - first < call->block ? channels - first : call->block);
    long place = sequence * channels + first;
    float da[size + LANES], db[size + LANES], w[size + LANES], u[size + LANES];
    double dw[size + LANES], du[size + LANES];
    (void)unused;
    NAME(read_state)(call->d_a, place, size, da);
    NAME(read_state)(call->d_b, place, size, db);
    NAME(read_state)(call->w, first, size, w);
    NAME(read_state)(call->u, first, size, u);
    memset(dw, 0, sizeof dw);
    memset(du, 0, sizeof du);
    for (long t = call->starts[sequence + 1] - 1; t >= call->starts[sequence]; t--) {
        long at = t * channels + first;
        for (int j = 0; j < size; j += LANES) {
            int left = size - j;
            vector k = NAME(read)(call->k + at + j, left), v = NAME(read)(call->v + at + j, left);
            vector A = NAME(read)(call->kept + at + j, left), B = NAME(read)(call->kept + all + at + j, left);
            vector M = NAME(read)(call->kept + 2 * all + at + j, left), dA = *(vector *)(da + j), dB = *(vector *)(db + j);
            NAME(Pair) out = NAME(weights)(M, k + *(vector *)(u + j)), next = NAME(weights)(M + *(vector *)(w + j), k);
            vector divisor = out.first * B + out.second, o = (out.first * A + out.second * v) / divisor;
            vector n = {0}, d;
            if (call->d_out) n = NAME(read)(call->d_out + at + j, left) / divisor;
            d = -n * o;
            vector own = out.second * (v * n + d), age = next.first * (A * dA + B * dB);
            NAME(write)(call->dv + at + j, out.second * n + next.second * dA, left);
            NAME(write)(call->dk + at + j, own + next.second * (v * dA + dB), left);
            for (int i = 0; i < LANES; i++) dw[j + i] += age[i], du[j + i] += own[i];
            *(vector *)(da + j) = out.first * n + next.first * dA;
            *(vector *)(db + j) = out.first * d + next.first * dB;
        }
    }
    for (int j = 0; j < size; j++) call->dw[place + j] = (float)dw[j], call->du[place + j] = (float)du[j];
    NAME(write_state)(call->d_start_a, place, size, da);
    NAME(write_state)(call->d_start_b, place, size, db);
}
