/* Corrected values of correlated keys, for one instruction set (see tiles.h); numbers in brackets are equations of
 * docs/chunk_algorithm.md.
 *
 * Where many earlier keys of the chunk point a token's way and are written with a strength near 2, its row of A_ab is long, and the
 * rounding of A_ab to float32 costs more than a token loop's roundings do. From the first such row on, A_ab is made again and (4.2)
 * solved in float64. Rows before it do not notice: later tokens change no bit of theirs.
 */

#define LONG 12 /* the sum of squares of a row, as in portable/correlated.py */

typedef double NAME(wide) __attribute__((vector_size(8 * LANES), aligned(8), may_alias));

INLINE NAME(wide) NAME(widened)(const float *x) { return __builtin_convertvector(*(const vector *)x, NAME(wide)); }

/* The first long row of A_ab, or n. */
static int NAME(first_long)(int n, const float *A) {
    for (int i = 1; i < n; i++) {
        vector sum = {0};
        for (int j = 0; j < i; j += LANES) sum += *(const vector *)(A + i * CHUNK + j) * *(const vector *)(A + i * CHUNK + j);
        if (NAME(sum)(sum) > LONG) return i;
    }
    return n;
}

/* 16 columns of x y for up to 8 rows of x, in float64. */
INLINE void NAME(long_block)(int rows, int depth, const float *x, long ldx, const float *y, long ldy, NAME(wide) sum[8]) {
    for (int r = 0; r < 8; r++) sum[r] = (NAME(wide)){0};
    for (int k = 0; k < depth; k++) {
        NAME(wide) column = NAME(widened)(y + k * ldy);
#pragma GCC unroll 8
        for (int r = 0; r < 8; r++) sum[r] += (double)x[(r < rows ? r : 0) * ldx + k] * column;
    }
}

/* Rows from `begin` on of the lower triangle of x y, in float64; y is [depth, CHUNK]. */
static void NAME(long_products)(int n, int begin, int depth, const float *x, int width, const float *y, double *out) {
    for (int block = 0; block < n; block += LANES)
        for (int i = begin > block ? begin : block; i < n; i += 8) {
            NAME(wide) sum[8];
            int rows = NAME(smaller)(8, n - i);
            NAME(long_block)(rows, depth, x + i * width, width, y + block, CHUNK, sum);
            for (int r = 0; r < rows; r++) *(NAME(wide) *)(out + (i + r) * CHUNK + block) = sum[r];
        }
}

/* The sum of (x S) o y over channels, of rows from `begin` on, in float64. */
static void NAME(long_reads)(const Problem *p, const NAME(Chunk) * c, const float *x, const float *S, const float *y, double *out) {
    for (int i = c->begin; i < c->n; i += 8) {
        int rows = NAME(smaller)(8, c->n - i);
        NAME(wide) sum[8], total[8] = {0};
        for (int block = 0; block < p->Vp; block += LANES) {
            NAME(long_block)(rows, p->K, x + i * p->Kp, p->Kp, S + block, p->Vp, sum);
            for (int r = 0; r < rows; r++) total[r] += sum[r] * NAME(widened)(y + (i + r) * p->Vp + block);
        }
        for (int r = 0; r < rows; r++) {
            out[i + r] = 0;
            for (int l = 0; l < LANES; l++) out[i + r] += total[r][l];
        }
    }
}

/* The same times the decay of each pair, one decay per token: running products down the columns [2.1]. */
static void NAME(decay_long_pairs)(const Problem *p, const NAME(Chunk) * c, long first, int begin) {
    double between[CHUNK]; /* e^{G_i - G_j}, of an exclusive row that of the row above */
    for (int i = 0; i < c->n; i++) {
        double decay = exp((double)p->g[(first + i) * p->HV]), *row = c->A_long + i * CHUNK;
        for (int j = 0; j < i && !p->row[1].exclusive; j++) between[j] *= decay;
        for (int j = 0; j < i && i >= begin; j++) row[j] *= between[j];
        for (int j = 0; j < i && p->row[1].exclusive; j++) between[j] *= decay;
        between[i] = 1;
    }
}

/* Rows from `begin` on of A_ab, one decay per channel: column after column, its key decayed from row to row [1.7]. */
static void NAME(long_channel_pairs)(const Problem *p, const NAME(Chunk) * c, int begin) {
    const float *X = c->X[1], *Y = c->Y[p->columns - 1];
    int exclusive = p->row[1].exclusive;
    for (int i = begin; i < c->n; i++) memset(c->A_long + i * CHUNK, 0, sizeof(double) * CHUNK);
    for (int k = 0; k < p->Kp; k += LANES) {
        NAME(wide) d[CHUNK], x[CHUNK];
        for (int i = 0; i < c->n; i++) d[i] = NAME(widened)(c->d + i * p->Kp + k), x[i] = NAME(widened)(X + i * p->Kp + k);
        for (int j = 0; j < c->n; j++) {
            NAME(wide) y = NAME(widened)(Y + j * p->Kp + k);
            for (int i = j + 1; i < c->n; i++) {
                if (!exclusive) y *= d[i];
                if (i >= begin) {
                    NAME(wide) pair = x[i] * y;
                    double sum = 0;
                    for (int l = 0; l < LANES; l++) sum += pair[l];
                    c->A_long[i * CHUNK + j] += sum;
                }
                if (exclusive) y *= d[i];
            }
        }
    }
}

/* x_i <- x_i + A_ij x_j of rows from `begin` on, in float64; with `back` the transpose of these rows: those before it get their part. */
static void NAME(solve_long)(int n, int width, int begin, const double *A, float *x, int back) {
    for (int column = 0; column < width; column += LANES) {
        NAME(wide) y[CHUNK];
        for (int i = 0; i < n; i++) y[i] = NAME(widened)(x + i * width + column);
        for (int m = 0; m < (back ? n : n - begin); m++) {
            int i = back ? n - 1 - m : begin + m, j = !back ? 0 : i < begin ? begin : i + 1, end = back ? n : i;
            NAME(wide) sum = y[i], other = {0};
            for (; j + 2 <= end; j += 2) {
                sum += A[back ? j * CHUNK + i : i * CHUNK + j] * y[j];
                other += A[back ? (j + 1) * CHUNK + i : i * CHUNK + j + 1] * y[j + 1];
            }
            if (j < end) other += A[back ? j * CHUNK + i : i * CHUNK + j] * y[j];
            y[i] = sum + other;
        }
        for (int i = back ? 0 : begin; i < n; i++)
            *(vector *)(x + i * width + column) = __builtin_convertvector(y[i], vector);
    }
}

/* x <- (I - A_ab)^{-1} x [4.2], or with `back` its transpose [5.5]. */
static void NAME(correct)(const Problem *p, NAME(Chunk) * c, long first, float *x, int back) {
    const float *A = c->A[1][p->columns - 1];
    int begin = c->begin = NAME(first_long)(c->n, A);
    if (begin == c->n) {
        NAME(solve)(c->n, p->Vp, A, x, back);
        return;
    }
    if (p->decay == CHANNEL_DECAY)
        NAME(long_channel_pairs)(p, c, begin);
    else
        NAME(long_products)(c->n, begin, p->K, c->X[1], p->Kp, c->Yt[p->columns - 1], c->A_long);
    if (p->decay == TOKEN_DECAY) NAME(decay_long_pairs)(p, c, first, begin);
    if (back) NAME(solve_long)(c->n, p->Vp, begin, c->A_long, x, 1);
    NAME(solve)(begin, p->Vp, A, x, back);
    if (!back) NAME(solve_long)(c->n, p->Vp, begin, c->A_long, x, 0);
}

/* What long rows and their columns give the gradient of one decay per token, in float64, since their sums cancel: pairs, rows, columns and
 * total of [2.5], summed as in [2.6]. `S` and `dS` are at the chunk's start and end, `dZ` is dR, `Wt` the transpose of nu.
 */
static void NAME(long_decays)(const Problem *p, const NAME(Chunk) * c, long first, const float *S, const float *dS,
                              const float *dZ, const float *Wt, const float *total) {
    int n = c->n, exclusive = p->row[1].exclusive, last = p->columns - 1;
    double P[CHUNK * CHUNK], rows[CHUNK], columns[CHUNK], of_rows[CHUNK] = {0}, later[CHUNK] = {0}, running = 0;
    NAME(long_products)(n, c->begin, p->V, dZ, p->Vp, Wt, P);
    NAME(long_reads)(p, c, c->rows[1], S, dZ, rows);
    NAME(long_reads)(p, c, c->columns[last], dS, c->W[last], columns);
    for (int i = c->begin; i < n; i++) of_rows[i - exclusive] = rows[i];
    for (int i = 0; i < p->K; i++) running += total[i];
    for (int j = c->begin; j < n; j++) later[j] = columns[j];
    for (int t = n - 1; t >= 0; t--) { /* row t + exclusive is added on the way down */
        int i = t + exclusive;
        double sum = running += of_rows[t];
        for (int j = 0; i >= c->begin && i < n && j < i; j++) later[j] += P[i * CHUNK + j] * c->A_long[i * CHUNK + j];
        for (int j = 0; j < t; j++) sum += later[j];
        p->dg[(first + t) * p->HV] += (float)sum;
    }
}
