/* Decays and pairs of a chunk, for one instruction set (see tiles.h); numbers in brackets are equations of docs/chunk_algorithm.md. */

/* The tiles of a chunk that both directions need. */
typedef struct {
    int n, begin;                              /* tokens; the first long row of A_ab, or n: see correlated.h */
    float *X[2], *Y[2], *rows[2], *columns[2]; /* keys, and as they meet the state: ~x and ^y of [1.6] */
    float *Yt[2], *A[2][2], *W[2];
    float *total;                              /* [K]: e^{G_C} */
    float *E, *prefix;                         /* one decay per token: e^{G_i - G_j}, e^{G_i} */
    float *d, *F, *in, *Yb[2][BLOCKS];         /* one per channel: e^g, and see channel_pairs */
    double *A_long;                            /* the rows of A_ab that are made in float64, see correlated.h */
} NAME(Chunk);

static NAME(Chunk) NAME(chunk_of)(const Problem *p, float **memory) {
    NAME(Chunk) c = {0};
    for (int i = 0; i < 2; i++) {
        c.X[i] = take(memory, CHUNK * p->Kp), c.rows[i] = take(memory, CHUNK * p->Kp);
        c.Y[i] = take(memory, CHUNK * p->Kp), c.columns[i] = take(memory, CHUNK * p->Kp);
        c.Yt[i] = take(memory, CHUNK * p->Kp), c.W[i] = take(memory, CHUNK * p->Vp);
        for (int j = 0; j < 2; j++) c.A[i][j] = take(memory, CHUNK * CHUNK);
    }
    c.total = take(memory, p->Kp), c.E = take(memory, CHUNK * CHUNK), c.prefix = take(memory, CHUNK);
    c.d = take(memory, CHUNK * p->Kp), c.F = take(memory, CHUNK * p->Kp), c.in = take(memory, CHUNK * p->Kp);
    c.A_long = (double *)take(memory, 2 * CHUNK * CHUNK);
    for (int s = 0; s < 2; s++) {
        for (int b = 0; b < BLOCKS - 1; b++) c.Yb[s][b] = take(memory, CHUNK * p->Kp);
        c.Yb[s][BLOCKS - 1] = c.columns[s];
    }
    return c;
}

static float NAME(dot)(int width, const float *x, const float *y) {
    vector sum = {0};
    for (int c = 0; c < width; c += LANES) sum += *(const vector *)(x + c) * *(const vector *)(y + c);
    return NAME(sum)(sum);
}

/* y = f x, row by row: `f` one number per row, of an exclusive row that of the row above, 1 for the first [1.6]. */
static void NAME(scale_rows)(int n, int width, const float *f, int exclusive, const float *x, float *y) {
    for (int i = 0; i < n; i++) {
        float factor = !exclusive ? f[i] : i ? f[i - 1] : 1;
        for (int c = 0; c < width; c++) y[i * width + c] = factor * x[i * width + c];
    }
    memset(y + n * width, 0, sizeof(float) * (CHUNK - n) * width);
}

/* Decays between tokens, each a product of single ones, in float64 and rounded once [2.1]: E_ij = e^{G_i - G_j}. */
static void NAME(token_factors)(const Problem *p, NAME(Chunk) * c, long first) {
    double d[CHUNK], column[CHUNK], prefix = 1;
    for (int i = 0; i < c->n; i++) { /* e^{G_i}, the row factor of [2.1] */
        d[i] = p->g ? exp((double)p->g[(first + i) * p->HV]) : 1;
        c->prefix[i] = (float)(prefix *= d[i]);
    }
    for (int i = 0; i < c->n; i++) { /* e^{G_i - G_j}, the pair factor of [2.1]; 0 for j > i */
        float *row = c->E + i * CHUNK;
        for (int j = 0; j < i; j++) row[j] = (float)(column[j] *= d[i]);
        row[i] = (float)(column[i] = 1);
        for (int j = i + 1; j < CHUNK; j++) row[j] = 0;
    }
    for (int i = 0; i < p->K; i++) c->total[i] = c->prefix[c->n - 1]; /* e^{G_C} of [1.11] */
}

/* A times the decay of each pair, 0 where a row does not see a column [1.7]. */
static void NAME(decay_pairs)(const Key *key, const float *E, int n, float *A) {
    for (int i = 0; i < n; i++) {
        int width = (i / LANES + 1) * LANES;
        float *row = A + i * CHUNK;
        if (key->exclusive && i == 0)
            memset(row, 0, sizeof(float) * width);
        else {
            const float *e = E + (i - key->exclusive) * CHUNK;
            for (int j = 0; j < width; j++) row[j] *= e[j];
            if (!key->diagonal) row[i] = 0;
        }
    }
}

/* The part of `x y^T` on and below the diagonal, by blocks of rows; `yt` is y transposed. */
static void NAME(lower)(int n, int depth, const float *x, int width, const float *yt, float *A) {
    for (int i = 0; i < n; i += LANES)
        NAME(product)(NAME(smaller)(LANES, n - i), i + LANES, depth, x + i * width, width, 1, yt, CHUNK, A + i * CHUNK, CHUNK, 0);
}

/* y += A x, A zero above its diagonal; with `back` its transpose. */
static void NAME(triangle)(int n, const float *A, const float *x, int width, float *y, int back) {
    for (int i = 0; i < n; i += LANES) {
        int rows = NAME(smaller)(LANES, n - i);
        if (back)
            NAME(product)(rows, width, n - i, A + i * CHUNK + i, 1, CHUNK, x + i * width, width, y + i * width, width, 1);
        else
            NAME(product)(rows, width, i + rows, A + i * CHUNK, CHUNK, 1, x, width, y + i * width, width, 1);
    }
}

/* Decays and pairs, one decay per token. */
static void NAME(token_pairs)(const Problem *p, NAME(Chunk) * c, long first) {
    NAME(token_factors)(p, c, first);
    for (int s = 0; s < p->columns; s++) {
        NAME(transpose)(CHUNK, p->Kp, c->Y[s], p->Kp, c->Yt[s], CHUNK);
        NAME(scale_rows)(c->n, p->Kp, c->E + (c->n - 1) * CHUNK, 0, c->Y[s], c->columns[s]); /* ^y of [1.6] */
    }
    for (int r = 0; r < p->rows; r++) {
        NAME(scale_rows)(c->n, p->Kp, c->prefix, p->row[r].exclusive, c->X[r], c->rows[r]); /* ~x of [1.6] */
        for (int s = 0; s < p->columns; s++) { /* [1.7] */
            NAME(lower)(c->n, p->K, c->X[r], p->Kp, c->Yt[s], c->A[r][s]);
            NAME(decay_pairs)(&p->row[r], c->E, c->n, c->A[r][s]);
        }
    }
}

/* e^r - 1, a polynomial, and 2^n with x = n ln 2 + r, for x <= 0; below -87.3 those of -87.3, NaN stays NaN. */
INLINE vector NAME(reduced)(vector x, vector *power) {
    vector least = {0};
    least -= 87.3f;
    typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4)));
    whole mask = ~(x < least);
    x = (vector)((mask & (whole)x) | (~mask & (whole)least));
    vector n = x * 1.44269504f + 12582912.f - 12582912.f; /* rounds to whole numbers */
    vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vector y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f, y = y * r + 4.1665795894e-2f, y = y * r + 1.6666665459e-1f, y = y * r + 5.0000001201e-1f;
    *power = (vector)((__builtin_convertvector(n, whole) + 127) << 23);
    return y * r * r + r;
}

/* e^x of x <= 0; below -87.3 it is 0, of -inf too. */
INLINE vector NAME(exponential)(vector x) {
    vector least = {0}, power, y = NAME(reduced)(x, &power);
    least -= 87.3f;
    typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4)));
    whole mask = ~(x < least);
    return (vector)(mask & (whole)((y + 1) * power));
}

/* y = f x, element by element. */
static void NAME(times)(int numbers, const float *f, const float *x, float *y) {
    for (int c = 0; c < numbers; c++) y[c] = f[c] * x[c];
}

/* The factor of the row key of token i: its row of a tile of decays since token `begin`, if it is exclusive the row above [2.1]. */
static const float *NAME(factor)(const Problem *p, const Key *key, const float *tile, int i, int begin, const float *ones) {
    i -= key->exclusive;
    return i < begin ? ones : tile + i * p->Kp;
}

/* Pairs within a block of tokens, by running products of single decays [1.7]. */
static void NAME(inner_pairs)(const Problem *p, NAME(Chunk) * c, int begin, int end) {
    int Kp = p->Kp;
    for (int s = 0; s < p->columns; s++)
        for (int j = begin; j < end; j++) { /* column j: w = y_j e^{G_i - G_j}, from row to row */
            vector sum[2][LANES] = {0};
            for (int k = 0; k < Kp; k += LANES) {
                vector w = *(vector *)(c->Y[s] + j * Kp + k);
                for (int i = j; i < end; i++) {
                    vector before = w;
                    if (i > j) w *= *(vector *)(c->d + i * Kp + k);
                    for (int r = 0; r < p->rows; r++)
                        sum[r][i - begin] += (p->row[r].exclusive ? before : w) * *(vector *)(c->X[r] + i * Kp + k);
                }
            }
            for (int r = 0; r < p->rows; r++)
                for (int i = begin; i < end; i++)
                    c->A[r][s][i * CHUNK + j] = i > j || (i == j && p->row[r].diagonal) ? NAME(sum)(sum[r][i - begin]) : 0;
        }
    for (int r = 0; r < p->rows; r++) /* above the diagonal blocks: zeros of [1.7] */
        for (int s = 0; s < p->columns; s++)
            for (int i = begin; i < end; i++)
                for (int j = end; j < begin + LANES; j++) c->A[r][s][i * CHUNK + j] = 0;
}

/* Decays and pairs, one decay per channel, block of tokens after block: a pair in one block by running products; one with a column
 * in an earlier block through its anchor m, the last token before the row's block [2.3]: `Yb` is the columns' decay up to there, `in`
 * the rows' from there, both products of decays and at least as large as the pair's own. `F` is the decay from the chunk's start. The
 * chunk's own, which the state is multiplied by again and again, is e to a sum: the rounding of each e^g near 1 would add up over chunks.
 */
static void NAME(channel_pairs)(const Problem *p, NAME(Chunk) * c, long first) {
    int Kp = p->Kp, n = c->n;
    float ones[Kp];
    double sums[Kp];
    for (int k = 0; k < Kp; k++) ones[k] = 1, sums[k] = 0;
    NAME(load)(n, p->K, p->g + first * p->HV * p->K, p->HV * p->K, 1, c->d, Kp);
    for (int i = 0; i < n; i++) { /* e^{G_i} and e^{G_i - G_m} [2.1] */
        float *d = c->d + i * Kp;
        for (int k = 0; k < Kp; k++) sums[k] += d[k];
        for (int k = 0; k < Kp; k += LANES) *(vector *)(d + k) = NAME(exponential)(*(vector *)(d + k));
        NAME(times)(Kp, d, i ? c->F + (i - 1) * Kp : ones, c->F + i * Kp);
        NAME(times)(Kp, d, i % LANES ? c->in + (i - 1) * Kp : ones, c->in + i * Kp);
    }
    for (int k = 0; k < Kp; k++) c->total[k] = (float)sums[k];
    for (int k = 0; k < Kp; k += LANES) *(vector *)(c->total + k) = NAME(exponential)(*(vector *)(c->total + k));
    for (int r = 0; r < p->rows; r++) { /* ~x of [1.6] */
        memset(c->rows[r] + n * Kp, 0, sizeof(float) * (CHUNK - n) * Kp);
        for (int i = 0; i < n; i++)
            NAME(times)(Kp, NAME(factor)(p, &p->row[r], c->F, i, 0, ones), c->X[r] + i * Kp, c->rows[r] + i * Kp);
    }
    for (int begin = 0; begin < n; begin += LANES) {
        int end = NAME(smaller)(begin + LANES, n), block = begin / LANES;
        float X[LANES * Kp], run[Kp];
        for (int r = 0; r < p->rows && begin; r++) { /* rows of this block with columns of earlier ones: one product [3.1] */
            for (int i = begin; i < end; i++)
                NAME(times)(Kp, NAME(factor)(p, &p->row[r], c->in, i, begin, ones), c->X[r] + i * Kp, X + (i - begin) * Kp);
            for (int s = 0; s < p->columns; s++)
                NAME(product)(end - begin, begin, p->K, X, Kp, 1, c->Yt[s], CHUNK, c->A[r][s] + begin * CHUNK, CHUNK, 0);
        }
        NAME(inner_pairs)(p, c, begin, end);
        for (int s = 0; s < p->columns; s++) { /* columns up to the end of this block: their part of [2.3], at last ^y of [1.6] */
            float *Y = end == n ? c->columns[s] : c->Yb[s][block], *before = block ? c->Yb[s][block - 1] : 0;
            for (int j = 0; j < begin; j++) NAME(times)(Kp, c->in + (end - 1) * Kp, before + j * Kp, Y + j * Kp);
            memcpy(run, ones, sizeof run);
            for (int j = end - 1; j >= begin; j--) {
                NAME(times)(Kp, run, c->Y[s] + j * Kp, Y + j * Kp);
                NAME(times)(Kp, run, c->d + j * Kp, run);
            }
            memset(Y + end * Kp, 0, sizeof(float) * (CHUNK - end) * Kp);
            if (end < n) NAME(transpose)(end, Kp, Y, Kp, c->Yt[s], CHUNK);
        }
    }
}
