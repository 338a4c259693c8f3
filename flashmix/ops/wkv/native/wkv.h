/* RWKV-4's averages of one sequence and block of channels, token after token, for one instruction set (see tiles.h of the recurrence).
 * What a thread works on is padded to whole vectors; tensors are not.
 */

/* The factors of two terms e^x and e^y divided by the larger one, and its logarithm. */
typedef struct {
    vector first, second, largest;
} NAME(Pair);

INLINE NAME(Pair) NAME(weights)(vector x, vector y) {
    typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4)));
    vector least = {0};
    least -= 3.4028234e38f;
    NAME(Pair) p = {.largest = NAME(larger)(x, y)};
    vector base = NAME(larger)(p.largest, least), one = {0}, other;
    one += 1;
    whole mask = x >= y; /* one of both is the larger, e^0: one exponential for two factors */
    other = NAME(exponential)((vector)((mask & (whole)y) | (~mask & (whole)x)) - base);
    p.first = (vector)((mask & (whole)one) | (~mask & (whole)other));
    p.second = (vector)((mask & (whole)other) | (~mask & (whole)one));
    return p;
}

static void NAME(wkv)(const void *given, int64_t sequence, int64_t block, float *unused) {
    const Wkv *call = given;
    long channels = call->channels, first = block * call->block, all = call->tokens * channels;
    int size = (int)(channels - first < call->block ? channels - first : call->block);
    long place = sequence * channels + first;
    float a[size + LANES], b[size + LANES], m[size + LANES], w[size + LANES], u[size + LANES];
    (void)unused;
    NAME(read_state)(call->a, place, size, a);
    NAME(read_state)(call->b, place, size, b);
    NAME(read_state)(call->m, place, size, m);
    NAME(read_state)(call->w, first, size, w);
    NAME(read_state)(call->u, first, size, u);
    for (long t = call->starts[sequence]; t < call->starts[sequence + 1]; t++) {
        long at = t * channels + first;
        for (int j = 0; j < size; j += LANES) {
            int left = size - j;
            vector k = NAME(read)(call->k + at + j, left), v = NAME(read)(call->v + at + j, left);
            vector A = *(vector *)(a + j), B = *(vector *)(b + j), M = *(vector *)(m + j);
            NAME(Pair) out = NAME(weights)(M, k + *(vector *)(u + j)), next = NAME(weights)(M + *(vector *)(w + j), k);
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
