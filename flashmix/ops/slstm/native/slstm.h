/* The sLSTM of one sequence and head, token after token, for one instruction set (see tiles.h of the recurrence). What a thread works on
 * is padded to whole vectors; tensors are not. Each token is a product of the head's matrices, in cache, with the output before.
 */

/* to[columns] = from[rows] times a matrix in panels. */
static void NAME(times_matrix)(int rows, int columns, const float *from, const float *matrix, float *to) {
    enum { PARTS = PANEL / LANES };
    for (int j = 0; j < columns; j += PANEL) {
        vector total[PARTS];
        for (int p = 0; p < PARTS; p++) total[p] = (vector){0};
        for (int first = 0; first < rows; first += RUN) { /* longer runs of additions err more */
            int last = NAME(smaller)(first + RUN, rows);
            vector sum[PARTS];
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) sum[p] = (vector){0};
            for (int i = first; i < last; i++) {
                const vector *row = (const vector *)(matrix + (long)(i * PANEL));
#pragma GCC unroll 4
                for (int p = 0; p < PARTS; p++) sum[p] += from[i] * row[p];
            }
#pragma GCC unroll 4
            for (int p = 0; p < PARTS; p++) total[p] += sum[p];
        }
        for (int p = 0; p < PARTS; p++) *(vector *)(to + j + p * LANES) = total[p];
        matrix += (long)rows * PANEL;
    }
}

typedef struct {
    vector keep, write, z, o, m, closed; /* closed: 1 - sigmoid(f) */
} NAME(Gates);

/* a where the mask's condition x >= 0 holds, else b. */
INLINE vector NAME(where_positive)(vector x, vector a, vector b) {
    typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4)));
    whole mask = x >= 0;
    return (vector)((mask & (whole)a) | (~mask & (whole)b));
}

/* log(1 + u) for u from 0 to 1: 2 atanh(u / (2 + u)). */
INLINE vector NAME(log_of_one_and)(vector u) {
    vector s = u / (u + 2), q = s * s;
    vector y = q * (2.f / 15) + 2.f / 13;
    y = y * q + 2.f / 11, y = y * q + 2.f / 9, y = y * q + 2.f / 7, y = y * q + 2.f / 5, y = y * q + 2.f / 3, y = y * q + 2;
    return y * s;
}

/* The gates of the logits i, f, z, o, and the new maximum, from that before. */
INLINE NAME(Gates) NAME(gates)(vector i, vector f, vector z, vector o, vector before) {
    vector least = {0};
    least -= 3.4028234e38f;
    NAME(Gates) g;
    vector e = NAME(exponential)(NAME(where_positive)(f, -f, f)), open = 1 / (1 + e);
    vector log_keep = NAME(where_positive)(f, least * 0, f) - NAME(log_of_one_and)(e) + before;
    g.closed = NAME(where_positive)(f, e * open, open);
    g.m = NAME(larger)(log_keep, i);
    vector base = NAME(larger)(g.m, least);
    g.keep = NAME(exponential)(log_keep - base);
    g.write = NAME(exponential)(i - base);
    e = NAME(exponential)(2 * NAME(where_positive)(z, -z, z));
    g.z = (1 - e) / (1 + e);
    g.z = NAME(where_positive)(z, g.z, -g.z);
    e = NAME(exponential)(NAME(where_positive)(o, -o, o)), open = 1 / (1 + e);
    g.o = NAME(where_positive)(o, open, e * open);
    return g;
}

static void NAME(slstm)(const void *given, int64_t sequence, int64_t head, float *unused) {
    const Slstm *call = given;
    int D = (int)call->channels, Dp = (D + LANES - 1) / LANES * LANES;
    long row = call->heads * call->channels, all = call->tokens * row, place = sequence * row + head * D;
    const float *matrix = call->recurrent + head * 4 * (long)Dp * D;
    float a[4 * Dp], c[Dp], n[Dp], m[Dp], y[Dp];
    (void)unused;
    NAME(read_state)(call->c, place, D, c);
    NAME(read_state)(call->n, place, D, n);
    NAME(read_state)(call->m, place, D, m);
    NAME(read_state)(call->y, place, D, y);
    memset(a, 0, sizeof a);
    for (long t = call->starts[sequence]; t < call->starts[sequence + 1]; t++) {
        long at = t * row + head * D;
        if (call->recurrent) NAME(times_matrix)(D, 4 * Dp, y, matrix, a);
        for (int j = 0; j < D; j += LANES) {
            int left = D - j;
            vector i = NAME(read)(call->write + at + j, left) + *(vector *)(a + j);
            vector f = NAME(read)(call->forget + at + j, left) + *(vector *)(a + Dp + j);
            vector z = NAME(read)(call->candidate + at + j, left) + *(vector *)(a + 2 * Dp + j);
            vector o = NAME(read)(call->output + at + j, left) + *(vector *)(a + 3 * Dp + j);
            NAME(Gates) g = NAME(gates)(i, f, z, o, *(vector *)(m + j));
            vector C = g.keep * *(vector *)(c + j) + g.write * g.z, N = g.keep * *(vector *)(n + j) + g.write;
            vector Y = g.o * C / N;
            *(vector *)(c + j) = C, *(vector *)(n + j) = N, *(vector *)(m + j) = g.m, *(vector *)(y + j) = Y;
            NAME(write)(call->out + at + j, Y, left);
            if (!call->logits) continue;
            vector kept[4] = {i, f, z, o}, states[3] = {C, N, g.m};
            for (int k = 0; k < 4; k++) NAME(write)(call->logits + k * all + at + j, kept[k], left);
            for (int k = 0; k < 3; k++) NAME(write)(call->states + k * all + at + j, states[k], left);
        }
    }
    NAME(write_state)(call->last_c, place, D, c);
    NAME(write_state)(call->last_n, place, D, n);
    NAME(write_state)(call->last_m, place, D, m);
    NAME(write_state)(call->last_y, place, D, y);
}

/* The state's number `which` before token t. */
INLINE vector NAME(state_before)(const Slstm *call, int which, const float *start, long place, long t, long begin, long at, int left) {
    long row = call->heads * call->channels;
    if (t > begin) return NAME(read)(call->states + which * call->tokens * row + at - row, left);
    return NAME(read)(start + place, left);
}

/* From the last token to the first: dy and what reaches c and n from later tokens give the gradients of the logits, these times the
 * matrices the dy of the token before.
 */
static void NAME(slstm_backward)(const void *given, int64_t sequence, int64_t head, float *unused) {
    const Slstm *call = given;
    int D = (int)call->channels, Dp = (D + LANES - 1) / LANES * LANES, wide = (D + PANEL - 1) / PANEL * PANEL;
    long row = call->heads * call->channels, all = call->tokens * row, place = sequence * row + head * D;
    long begin = call->starts[sequence];
    const float *matrix = call->recurrent + head * 4 * (long)Dp * wide;
    float da[4 * Dp], dc[Dp], dn[Dp], dy[wide];
    (void)unused;
    memset(da, 0, sizeof da);
    NAME(read_state)(call->d_c, place, D, dc);
    NAME(read_state)(call->d_n, place, D, dn);
    NAME(read_state)(call->d_y, place, D, dy);
    for (long t = call->starts[sequence + 1] - 1; t >= begin; t--) {
        long at = t * row + head * D;
        for (int j = 0; j < D; j += LANES) {
            int left = D - j;
            vector a[4], back[4];
            for (int k = 0; k < 4; k++) a[k] = NAME(read)(call->logits + k * all + at + j, left);
            vector before = NAME(state_before)(call, 2, call->m, place + j, t, begin, at + j, left);
            NAME(Gates) g = NAME(gates)(a[0], a[1], a[2], a[3], before);
            vector C = NAME(read)(call->states + at + j, left), N = NAME(read)(call->states + all + at + j, left);
            vector Y = *(vector *)(dy + j);
            if (call->d_out) Y += NAME(read)(call->d_out + at + j, left);
            if (left < LANES)
                for (int k = left; k < LANES; k++) N[k] = 1;
            vector mean = C / N, through = Y * g.o / N;
            vector dC = *(vector *)(dc + j) + through, dN = *(vector *)(dn + j) - through * mean;
            back[0] = (dC * g.z + dN) * g.write;
            back[1] = (dC * NAME(state_before)(call, 0, call->c, place + j, t, begin, at + j, left) +
                       dN * NAME(state_before)(call, 1, call->n, place + j, t, begin, at + j, left)) * g.keep * g.closed;
            back[2] = dC * g.write * (1 - g.z * g.z);
            back[3] = Y * mean * g.o * (1 - g.o);
            *(vector *)(dc + j) = g.keep * dC, *(vector *)(dn + j) = g.keep * dN;
            for (int k = 0; k < 4; k++) {
                NAME(write)(call->d_logits + k * all + at + j, back[k], left);
                *(vector *)(da + k * Dp + j) = back[k];
            }
        }
        memset(dy, 0, sizeof dy);
        if (call->recurrent) NAME(times_matrix)(4 * Dp, wide, da, matrix, dy);
    }
    NAME(write_state)(call->d_start_c, place, D, dc);
    NAME(write_state)(call->d_start_n, place, D, dn);
    NAME(write_state)(call->d_start_y, place, D, dy);
}
