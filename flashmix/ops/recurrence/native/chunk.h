/* The phases of a chunk, forward and backward, for one instruction set (see tiles.h); numbers in brackets are equations of
 * docs/chunk_algorithm.md.
 */

/* The tiles of a chunk that both directions need. */
typedef struct {
    int n;                                     /* tokens */
    float *X[2], *Y[2], *rows[2], *columns[2]; /* keys, and as they meet the state: ~x and ^y of [1.6] */
    float *Yt[2], *A[2][2], *W[2];
    float *total;                              /* [K]: e^{G_C} */
    float *E, *prefix;                         /* one decay a token: e^{G_i - G_j}, e^{G_i} */
    float *d, *F, *in, *Yb[2][BLOCKS];         /* one a channel: e^g, and see channel_pairs */
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

/* y = f x, row by row: `f` a number a row, or 1 before the first where rows are exclusive. */
static void NAME(scale_rows)(int n, int width, const float *f, int exclusive, const float *x, float *y) {
    for (int i = 0; i < n; i++) {
        float factor = !exclusive ? f[i] : i ? f[i - 1] : 1;
        for (int c = 0; c < width; c++) y[i * width + c] = factor * x[i * width + c];
    }
    memset(y + n * width, 0, sizeof(float) * (CHUNK - n) * width);
}

/* Decays between tokens, each a product of single ones, in float64 and rounded once [2.1]. */
static void NAME(token_factors)(const Problem *p, NAME(Chunk) * c, long first) {
    double d[CHUNK], column[CHUNK], prefix = 1;
    for (int i = 0; i < c->n; i++) {
        d[i] = p->g ? exp((double)p->g[(first + i) * p->HV]) : 1;
        c->prefix[i] = (float)(prefix *= d[i]);
    }
    for (int i = 0; i < c->n; i++) {
        float *row = c->E + i * CHUNK;
        for (int j = 0; j < i; j++) row[j] = (float)(column[j] *= d[i]);
        row[i] = (float)(column[i] = 1);
        for (int j = i + 1; j < CHUNK; j++) row[j] = 0;
    }
    for (int i = 0; i < p->K; i++) c->total[i] = c->prefix[c->n - 1];
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

/* Decays and pairs, one decay a token. */
static void NAME(token_pairs)(const Problem *p, NAME(Chunk) * c, long first) {
    NAME(token_factors)(p, c, first);
    for (int s = 0; s < p->columns; s++) {
        NAME(transpose)(CHUNK, p->Kp, c->Y[s], p->Kp, c->Yt[s], CHUNK);
        NAME(scale_rows)(c->n, p->Kp, c->E + (c->n - 1) * CHUNK, 0, c->Y[s], c->columns[s]);
    }
    for (int r = 0; r < p->rows; r++) {
        NAME(scale_rows)(c->n, p->Kp, c->prefix, p->row[r].exclusive, c->X[r], c->rows[r]);
        for (int s = 0; s < p->columns; s++) {
            NAME(lower)(c->n, p->K, c->X[r], p->Kp, c->Yt[s], c->A[r][s]);
            NAME(decay_pairs)(&p->row[r], c->E, c->n, c->A[r][s]);
        }
    }
}

/* e^x of x <= 0: 2^round(x / ln 2) times a polynomial of the rest. */
INLINE vector NAME(exponential)(vector x) {
    vector least = {0};
    least -= 87.3f; /* below it 0, -inf too; NaN stays NaN */
    typedef int32_t whole __attribute__((vector_size(4 * LANES), aligned(4)));
    whole there = ~(x < least);
    x = (vector)((there & (whole)x) | (~there & (whole)least));
    vector n = x * 1.44269504f + 12582912.f - 12582912.f; /* rounds to whole numbers */
    vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vector y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f, y = y * r + 4.1665795894e-2f, y = y * r + 1.6666665459e-1f, y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1;
    whole power = (__builtin_convertvector(n, whole) + 127) << 23;
    return (vector)(there & (whole)(y * (vector)power));
}

/* y = f x, element by element. */
static void NAME(times)(int numbers, const float *f, const float *x, float *y) {
    for (int c = 0; c < numbers; c++) y[c] = f[c] * x[c];
}

/* What a row key of token i is scaled by: its row of a tile of decays since token `begin`, if it is exclusive the row above. */
static const float *NAME(factor)(const Problem *p, const Key *key, const float *tile, int i, int begin, const float *ones) {
    i -= key->exclusive;
    return i < begin ? ones : tile + i * p->Kp;
}

/* Pairs within a block of tokens, by running products of single decays. */
static void NAME(inner_pairs)(const Problem *p, NAME(Chunk) * c, int begin, int end) {
    int Kp = p->Kp;
    for (int s = 0; s < p->columns; s++)
        for (int j = begin; j < end; j++) {
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
    for (int r = 0; r < p->rows; r++)
        for (int s = 0; s < p->columns; s++)
            for (int i = begin; i < end; i++)
                for (int j = end; j < begin + LANES; j++) c->A[r][s][i * CHUNK + j] = 0;
}

/* Decays and pairs, one decay a channel, block of tokens after block: a pair in one block by running products; one with a column
 * in an earlier block through the last token before the row's block, `Yb` the columns' decay up to there, `in` the rows' from there:
 * both are products of decays and at least as large as the pair's own. `F` is the decay from the chunk's beginning.
 */
static void NAME(channel_pairs)(const Problem *p, NAME(Chunk) * c, long first) {
    int Kp = p->Kp, n = c->n;
    float ones[Kp];
    for (int k = 0; k < Kp; k++) ones[k] = 1;
    NAME(load)(n, p->K, p->g + first * p->HV * p->K, p->HV * p->K, 1, c->d, Kp);
    for (int i = 0; i < n; i++) {
        float *d = c->d + i * Kp;
        for (int k = 0; k < Kp; k += LANES) *(vector *)(d + k) = NAME(exponential)(*(vector *)(d + k));
        NAME(times)(Kp, d, i ? c->F + (i - 1) * Kp : ones, c->F + i * Kp);
        NAME(times)(Kp, d, i % LANES ? c->in + (i - 1) * Kp : ones, c->in + i * Kp);
    }
    memcpy(c->total, c->F + (n - 1) * Kp, sizeof(float) * Kp);
    for (int r = 0; r < p->rows; r++) {
        memset(c->rows[r] + n * Kp, 0, sizeof(float) * (CHUNK - n) * Kp);
        for (int i = 0; i < n; i++)
            NAME(times)(Kp, NAME(factor)(p, &p->row[r], c->F, i, 0, ones), c->X[r] + i * Kp, c->rows[r] + i * Kp);
    }
    for (int begin = 0; begin < n; begin += LANES) {
        int end = NAME(smaller)(begin + LANES, n), block = begin / LANES;
        float X[LANES * Kp], run[Kp];
        for (int r = 0; r < p->rows && begin; r++) {
            for (int i = begin; i < end; i++)
                NAME(times)(Kp, NAME(factor)(p, &p->row[r], c->in, i, begin, ones), c->X[r] + i * Kp, X + (i - begin) * Kp);
            for (int s = 0; s < p->columns; s++)
                NAME(product)(end - begin, begin, p->K, X, Kp, 1, c->Yt[s], CHUNK, c->A[r][s] + begin * CHUNK, CHUNK, 0);
        }
        NAME(inner_pairs)(p, c, begin, end);
        for (int s = 0; s < p->columns; s++) { /* columns up to the end of this block */
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

/* Gradients of keys and decays, one decay a channel, from those of pairs (`dA`), of keys as they meet the state (`dX`, `dY`, which
 * become those of the keys) and of the state's own factor: the blocks of `channel_pairs` backward. `dY` is at each block the
 * gradient of the columns' decay up to its end. A sum over pairs is taken where both of their parts are, so none cancels [2.6].
 */
static void NAME(channel_gradients)(const Problem *p, const NAME(Chunk) * c, float *const (*dA)[2], float *const *dX,
                                    float *const *dY, const float *total, long first) {
    int Kp = p->Kp, n = c->n;
    float ones[Kp], later[Kp], X[2][LANES * Kp], dXb[2][LANES * Kp], dg[LANES * Kp], run[Kp], w[LANES * Kp];
    for (int k = 0; k < Kp; k++) ones[k] = 1, later[k] = total[k];
    for (int begin = (n - 1) / LANES * LANES; begin >= 0; begin -= LANES) {
        int end = NAME(smaller)(begin + LANES, n), block = begin / LANES, m = end - begin;
        /* columns from here to later rows: of token t those before it */
        memset(run, 0, sizeof run);
        for (int s = 0; s < p->columns; s++) {
            const float *Y = end == n ? c->columns[s] : c->Yb[s][block];
            for (int j = 0; j < begin; j++)
                for (int k = 0; k < Kp; k++) run[k] += Y[j * Kp + k] * dY[s][j * Kp + k];
        }
        for (int t = begin; t < end; t++) {
            for (int k = 0; k < Kp; k++) dg[(t - begin) * Kp + k] = run[k] + later[k];
            for (int s = 0; s < p->columns; s++) {
                const float *Y = end == n ? c->columns[s] : c->Yb[s][block];
                for (int k = 0; k < Kp; k++) run[k] += Y[t * Kp + k] * dY[s][t * Kp + k];
            }
        }
        for (int s = 0; s < p->columns; s++) {
            for (int j = 0; j < begin; j++) NAME(times)(Kp, c->in + (end - 1) * Kp, dY[s] + j * Kp, dY[s] + j * Kp);
            memcpy(run, ones, sizeof run);
            for (int j = end - 1; j >= begin; j--) {
                NAME(times)(Kp, run, dY[s] + j * Kp, dY[s] + j * Kp);
                NAME(times)(Kp, run, c->d + j * Kp, run);
            }
        }
        /* rows from here to earlier columns and the state */
        for (int r = 0; r < p->rows; r++) {
            const Key *key = &p->row[r];
            for (int i = begin; i < end; i++) {
                float *dx = dX[r] + i * Kp, *block_dx = dXb[r] + (i - begin) * Kp;
                NAME(times)(Kp, NAME(factor)(p, key, c->in, i, begin, ones), c->X[r] + i * Kp, X[r] + (i - begin) * Kp);
                for (int k = 0; k < Kp; k++) later[k] += c->rows[r][i * Kp + k] * dx[k];
                NAME(times)(Kp, begin ? c->F + (begin - 1) * Kp : ones, dx, block_dx);
            }
            for (int s = 0; s < p->columns && begin; s++) {
                const float *pairs = dA[r][s] + begin * CHUNK;
                NAME(product)(m, Kp, begin, pairs, CHUNK, 1, c->Yb[s][block - 1], Kp, dXb[r], Kp, 1);
                NAME(product)(begin, Kp, m, pairs, 1, CHUNK, X[r], Kp, dY[s], Kp, 1);
            }
            memset(run, 0, sizeof run);
            for (int i = end - 1; i >= begin; i--) {
                float *x = X[r] + (i - begin) * Kp, *dx = dXb[r] + (i - begin) * Kp;
                int t = i - begin - key->exclusive;
                for (int k = 0; k < Kp; k++) run[k] += x[k] * dx[k];
                for (int k = 0; k < Kp && t >= 0; k++) dg[t * Kp + k] += run[k];
                NAME(times)(Kp, NAME(factor)(p, key, c->in, i, begin, ones), dx, dX[r] + i * Kp);
            }
        }
        /* pairs within the block */
        for (int s = 0; s < p->columns; s++)
            for (int j = begin; j < end; j++)
                for (int k = 0; k < Kp; k += LANES) {
                    vector *y = (vector *)(c->Y[s] + j * Kp + k), run = *y, u = {0};
                    for (int i = j + 1; i < end; i++)
                        *(vector *)(w + (i - begin) * LANES) = run *= *(vector *)(c->d + i * Kp + k);
                    for (int i = end - 1; i >= j; i--) {
                        vector here = i > j ? *(vector *)(w + (i - begin) * LANES) : *y;
                        vector before = i > j + 1 ? *(vector *)(w + (i - 1 - begin) * LANES) : *y;
                        for (int r = 0; r < p->rows; r++)
                            if (!p->row[r].exclusive && (i > j || p->row[r].diagonal)) {
                                float a = dA[r][s][i * CHUNK + j];
                                u += a * *(vector *)(c->X[r] + i * Kp + k);
                                *(vector *)(dX[r] + i * Kp + k) += a * here;
                            }
                        if (i == j) break;
                        *(vector *)(dg + (i - begin) * Kp + k) += here * u;
                        u *= *(vector *)(c->d + i * Kp + k);
                        for (int r = 0; r < p->rows; r++)
                            if (p->row[r].exclusive) {
                                float a = dA[r][s][i * CHUNK + j];
                                u += a * *(vector *)(c->X[r] + i * Kp + k);
                                *(vector *)(dX[r] + i * Kp + k) += a * before;
                            }
                    }
                    *(vector *)(dY[s] + j * Kp + k) += u;
                }
        if (p->dg)
            for (int t = begin; t < end; t++)
                for (int k = 0; k < p->K; k++) p->dg[(first + t) * p->HV * p->K + k] = dg[(t - begin) * Kp + k];
    }
}

/* Asks for rows of the chunk that comes next: one head's are too far apart for the machine to see it coming. */
static void NAME(ask)(const Problem *p, const float *tensor, long stride, int numbers, long next) {
    if (!tensor || next < 0) return;
    for (long i = next; i < p->tokens && i < next + CHUNK; i++)
        for (int j = 0; j < numbers; j += LANES) __builtin_prefetch(tensor + i * stride + j);
}

/* Keys, decays and pairs of the chunk that begins at token `first`; the one that begins at `next` is the next. */
static void NAME(load_chunk)(const Problem *p, NAME(Chunk) * c, long first, long next) {
    c->n = p->tokens - first < CHUNK ? (int)(p->tokens - first) : CHUNK;
    for (int r = 0; r < p->rows; r++) NAME(ask)(p, p->row[r].from, p->row[r].stride, p->K, next);
    for (int s = 0; s < p->columns; s++) NAME(ask)(p, p->column[s].from, p->column[s].stride, p->K, next);
    if (p->gate == CHANNEL_GATE) NAME(ask)(p, p->g, p->HV * p->K, p->K, next);
    NAME(ask)(p, p->v, p->HV * p->V, p->V, next);
    for (int r = 0; r < p->rows; r++) {
        const Key *key = &p->row[r];
        NAME(load)(c->n, p->K, key->from + first * key->stride, key->stride, key->sign, c->X[r], p->Kp);
    }
    for (int s = 0; s < p->columns; s++) {
        const Key *key = &p->column[s];
        NAME(load)(c->n, p->K, key->from + first * key->stride, key->stride, 1, c->Y[s], p->Kp);
        for (int i = 0; i < c->n && p->beta; i++) {
            float beta = p->beta[(first + i) * p->HV], *y = c->Y[s] + i * p->Kp;
            for (int j = 0; j < p->Kp; j++) y[j] *= beta;
        }
    }
    (p->gate == CHANNEL_GATE ? NAME(channel_pairs) : NAME(token_pairs))(p, c, first);
}

static void NAME(load_state)(const Problem *p, const float *from, float *S) {
    memset(S, 0, sizeof(float) * p->Kp * p->Vp);
    for (int i = 0; from && i < p->K; i++) memcpy(S + i * p->Vp, from + i * p->V, sizeof(float) * p->V);
}

static void NAME(store_state)(const Problem *p, const float *S, float *to) {
    NAME(store)(p->K, p->V, S, p->Vp, 1, to, p->V);
}

/* S <- e^{G_C} S + x^T y [1.11]. */
static void NAME(advance)(const Problem *p, const NAME(Chunk) * c, float *const *x, float *const *y, int kinds, float *S) {
    for (int i = 0; i < p->K; i++)
        for (int j = 0; j < p->Vp; j++) S[i * p->Vp + j] *= c->total[i];
    for (int s = 0; s < kinds; s++)
        NAME(product)(p->K, p->Vp, c->n, x[s], 1, p->Kp, y[s], p->Vp, S, p->Vp, 1);
}

static void NAME(forward)(const Call *call, int64_t sequence, int64_t head, float *memory) {
    Problem problem = problem_of(call, sequence, head), *p = &problem;
    NAME(Chunk) chunk = NAME(chunk_of)(p, &memory), *c = &chunk;
    float *S = take(&memory, p->Kp * p->Vp), *Z = take(&memory, CHUNK * p->Vp);
    long place = (sequence * p->HV + head) * p->K * p->V, values = p->HV * p->V;
    long begin = (call->starts[sequence] * p->HV + head) * p->V;
    NAME(load_state)(p, call->initial_state ? call->initial_state + place : 0, S);
    for (long first = 0; first < p->tokens; first += CHUNK) {
        NAME(load_chunk)(p, c, first, first + CHUNK);
        if (call->states)
            NAME(store_state)(p, S, call->states + ((p->first_chunk + first / CHUNK) * p->HV + head) * p->K * p->V);
        const float *v = p->v + first * values;
        if (p->raw) NAME(load)(c->n, p->V, v, values, 1, c->W[0], p->Vp);
        if (p->corrected) {
            float *nu = c->W[p->columns - 1];
            if (p->raw)
                memset(nu, 0, sizeof(float) * CHUNK * p->Vp);
            else
                NAME(load)(c->n, p->V, v, values, 1, nu, p->Vp);
            NAME(product)(c->n, p->Vp, p->K, c->rows[1], p->Kp, 1, S, p->Vp, nu, p->Vp, 1);
            if (p->raw) NAME(triangle)(c->n, c->A[1][0], c->W[0], p->Vp, nu, 0);
            NAME(solve)(c->n, p->Vp, c->A[1][p->columns - 1], nu, 0);
            if (call->nu) NAME(store)(c->n, p->V, nu, p->Vp, 1, call->nu + begin + first * values, values);
        }
        NAME(product)(c->n, p->Vp, p->K, c->rows[0], p->Kp, 1, S, p->Vp, Z, p->Vp, 0);
        for (int s = 0; s < p->columns; s++) NAME(triangle)(c->n, c->A[0][s], c->W[s], p->Vp, Z, 0);
        NAME(store)(c->n, p->V, Z, p->Vp, (float)call->scale, call->o + begin + first * values, values);
        NAME(advance)(p, c, c->columns, c->W, p->columns, S);
    }
    NAME(store_state)(p, S, call->state + place);
}

/* Gradients of keys and decays, one decay a token, from those of pairs (`dA`), of keys as they meet the state (`dX`, `dY`, which
 * become those of the keys) and of the state's own factor, by channel.
 */
static void NAME(token_gradients)(const Problem *p, const NAME(Chunk) * c, float *const (*dA)[2], float *const *dX,
                                  float *const *dY, const float *total, long first) {
    int Kp = p->Kp, n = c->n;
    const float *to_end = c->E + (n - 1) * CHUNK;
    float P[CHUNK * CHUNK], of_rows[CHUNK] = {0}, later[CHUNK] = {0}; /* of log e^{G_i - G_j}, e^{G_i} [2.5] */
    memset(P, 0, sizeof P);
    for (int r = 0; r < p->rows; r++)
        for (int i = p->row[r].exclusive; i < n; i++)
            of_rows[i - p->row[r].exclusive] += NAME(dot)(Kp, c->rows[r] + i * Kp, dX[r] + i * Kp);
    for (int s = 0; s < p->columns; s++)
        for (int j = 0; j < n; j++) P[(n - 1) * CHUNK + j] += NAME(dot)(Kp, c->columns[s] + j * Kp, dY[s] + j * Kp);
    for (int i = 0; i < p->K; i++) of_rows[n - 1] += total[i];
    for (int r = 0; r < p->rows; r++) NAME(scale_rows)(n, Kp, c->prefix, p->row[r].exclusive, dX[r], dX[r]);
    for (int s = 0; s < p->columns; s++) NAME(scale_rows)(n, Kp, to_end, 0, dY[s], dY[s]);
    for (int s = 0; s < p->columns; s++)
        for (int r = 0; r < p->rows; r++) {
            int exclusive = p->row[r].exclusive;
            for (int i = exclusive; i < n; i++)
                for (int j = 0; j < (i / LANES + 1) * LANES; j++)
                    P[(i - exclusive) * CHUNK + j] += c->A[r][s][i * CHUNK + j] * dA[r][s][i * CHUNK + j];
            NAME(decay_pairs)(&p->row[r], c->E, n, dA[r][s]);
            NAME(triangle)(n, dA[r][s], c->Y[s], Kp, dX[r], 0);
            NAME(triangle)(n, dA[r][s], c->X[r], Kp, dY[s], 1);
        }
    float running = 0;
    for (int t = n - 1; t >= 0 && p->dg; t--) { /* the sums of [2.6] */
        float sum = running += of_rows[t];
        for (int j = 0; j < CHUNK; j++) later[j] += P[t * CHUNK + j];
        for (int j = 0; j < t; j++) sum += later[j];
        p->dg[(first + t) * p->HV] = sum;
    }
}

/* Gradients of the operands from those of the keys; the tied rule has both of its keys, and beta, from one operand. */
static void NAME(store_keys)(const Problem *p, const NAME(Chunk) * c, float *const *dX, float *const *dY, long first) {
    if (p->beta) {
        for (int i = 0; i < c->n; i++) { /* the row key is -k, the column key beta k */
            float *drow = dX[1] + i * p->Kp, *dcolumn = dY[0] + i * p->Kp, beta = p->beta[(first + i) * p->HV];
            p->dbeta[(first + i) * p->HV] = -NAME(dot)(p->Kp, c->X[1] + i * p->Kp, dcolumn);
            for (int j = 0; j < p->Kp; j++) dcolumn[j] = beta * dcolumn[j] - drow[j];
        }
    } else if (p->corrected)
        NAME(store)(c->n, p->K, dX[1], p->Kp, 1, p->row[1].to + first * p->row[1].to_stride, p->row[1].to_stride);
    NAME(store)(c->n, p->K, dX[0], p->Kp, 1, p->row[0].to + first * p->row[0].to_stride, p->row[0].to_stride);
    for (int s = 0; s < p->columns; s++)
        NAME(store)(c->n, p->K, dY[s], p->Kp, 1, p->column[s].to + first * p->column[s].to_stride, p->column[s].to_stride);
}

static void NAME(backward)(const Call *call, int64_t sequence, int64_t head, float *memory) {
    Problem problem = problem_of(call, sequence, head), *p = &problem;
    NAME(Chunk) chunk = NAME(chunk_of)(p, &memory), *c = &chunk;
    int Kp = p->Kp, Vp = p->Vp, last = p->columns - 1;
    float *S = take(&memory, Kp * Vp), *dS = take(&memory, Kp * Vp), *St = take(&memory, Kp * Vp);
    float *dZ[2], *dW[2], *dX[2], *dY[2], *dA[2][2], *Wt = take(&memory, CHUNK * Vp), *total = take(&memory, Kp);
    for (int i = 0; i < 2; i++) {
        dZ[i] = take(&memory, CHUNK * Vp), dW[i] = take(&memory, CHUNK * Vp);
        dX[i] = take(&memory, CHUNK * Kp), dY[i] = take(&memory, CHUNK * Kp);
        for (int j = 0; j < 2; j++) dA[i][j] = take(&memory, CHUNK * CHUNK);
    }
    long place = (sequence * p->HV + head) * p->K * p->V, values = p->HV * p->V;
    long begin = (call->starts[sequence] * p->HV + head) * p->V;
    NAME(load_state)(p, call->d_state ? call->d_state + place : 0, dS);
    for (long first = (p->tokens - 1) / CHUNK * CHUNK; p->tokens && first >= 0; first -= CHUNK) {
        NAME(load_chunk)(p, c, first, first - CHUNK);
        NAME(ask)(p, p->corrected ? call->nu + begin : 0, values, p->V, first - CHUNK);
        NAME(ask)(p, call->d_o ? call->d_o + begin : 0, values, p->V, first - CHUNK);
        int n = c->n;
        NAME(load_state)(p, call->states + ((p->first_chunk + first / CHUNK) * p->HV + head) * p->K * p->V, S);
        if (p->raw) NAME(load)(n, p->V, p->v + first * values, values, 1, c->W[0], Vp);
        if (p->corrected) NAME(load)(n, p->V, call->nu + begin + first * values, values, 1, c->W[last], Vp);
        if (call->d_o)
            NAME(load)(n, p->V, call->d_o + begin + first * values, values, (float)call->scale, dZ[0], Vp);
        else
            memset(dZ[0], 0, sizeof(float) * CHUNK * Vp);
        for (int s = 0; s < p->columns; s++) { /* what is written: by the output, by the state */
            NAME(product)(n, Vp, p->K, c->columns[s], Kp, 1, dS, Vp, dW[s], Vp, 0);
            NAME(triangle)(n, c->A[0][s], dZ[0], Vp, dW[s], 1);
        }
        if (p->corrected) {
            NAME(solve)(n, Vp, c->A[1][last], dW[last], 1);
            memcpy(dZ[1], dW[last], sizeof(float) * n * Vp);
            if (p->raw) NAME(triangle)(n, c->A[1][0], dZ[1], Vp, dW[0], 1);
        }
        NAME(store)(n, p->V, dW[0], Vp, 1, call->dv + begin + first * values, values);
        /* keys against the state */
        NAME(transpose)(Kp, Vp, S, Vp, St, Kp);
        for (int r = 0; r < p->rows; r++) NAME(product)(n, Kp, p->V, dZ[r], Vp, 1, St, Kp, dX[r], Kp, 0);
        NAME(transpose)(Kp, Vp, dS, Vp, St, Kp);
        for (int s = 0; s < p->columns; s++) NAME(product)(n, Kp, p->V, c->W[s], Vp, 1, St, Kp, dY[s], Kp, 0);
        for (int s = 0; s < p->columns; s++) { /* keys against each other */
            NAME(transpose)(CHUNK, Vp, c->W[s], Vp, Wt, CHUNK);
            for (int r = 0; r < p->rows; r++) NAME(lower)(n, p->V, dZ[r], Vp, Wt, dA[r][s]);
        }
        for (int i = 0; i < Kp; i++) total[i] = c->total[i] * NAME(dot)(Vp, S + i * Vp, dS + i * Vp);
        if (p->gate == CHANNEL_GATE)
            NAME(channel_gradients)(p, c, dA, dX, dY, total, first);
        else
            NAME(token_gradients)(p, c, dA, dX, dY, total, first);
        NAME(advance)(p, c, c->rows, dZ, p->rows, dS);
        NAME(store_keys)(p, c, dX, dY, first);
    }
    if (call->d_initial_state) NAME(store_state)(p, dS, call->d_initial_state + place);
}
