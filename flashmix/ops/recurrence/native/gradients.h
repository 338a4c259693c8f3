/* Gradients of keys and decays from those of pairs, for one instruction set (see tiles.h); numbers in brackets are equations of
 * docs/chunk_algorithm.md.
 */

/* Gradients of keys and decays, one decay per channel, from those of pairs (`dA`), of keys as they meet the state (`dX`, `dY`, which
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
        /* column_j of [2.5], summed over j < t for [2.6]; `later` holds the rows past this block and the total */
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
        for (int s = 0; s < p->columns; s++) { /* dY o e^{G_m - G_j} [6.4] */
            for (int j = 0; j < begin; j++) NAME(times)(Kp, c->in + (end - 1) * Kp, dY[s] + j * Kp, dY[s] + j * Kp);
            memcpy(run, ones, sizeof run);
            for (int j = end - 1; j >= begin; j--) {
                NAME(times)(Kp, run, dY[s] + j * Kp, dY[s] + j * Kp);
                NAME(times)(Kp, run, c->d + j * Kp, run);
            }
        }
        /* rows of this block with earlier columns and the state */
        for (int r = 0; r < p->rows; r++) {
            const Key *key = &p->row[r];
            for (int i = begin; i < end; i++) { /* row_i of [2.5]; ~dx [6.4] as far as the anchor */
                float *dx = dX[r] + i * Kp, *block_dx = dXb[r] + (i - begin) * Kp;
                NAME(times)(Kp, NAME(factor)(p, key, c->in, i, begin, ones), c->X[r] + i * Kp, X[r] + (i - begin) * Kp);
                for (int k = 0; k < Kp; k++) later[k] += c->rows[r][i * Kp + k] * dx[k];
                NAME(times)(Kp, begin ? c->F + (begin - 1) * Kp : ones, dx, block_dx);
            }
            for (int s = 0; s < p->columns && begin; s++) { /* [3.4] */
                const float *pairs = dA[r][s] + begin * CHUNK;
                NAME(product)(m, Kp, begin, pairs, CHUNK, 1, c->Yb[s][block - 1], Kp, dXb[r], Kp, 1);
                NAME(product)(begin, Kp, m, pairs, 1, CHUNK, X[r], Kp, dY[s], Kp, 1);
            }
            memset(run, 0, sizeof run);
            for (int i = end - 1; i >= begin; i--) { /* P_ij and row_i of [2.5], summed over rows e(i) >= t for [2.6] */
                float *x = X[r] + (i - begin) * Kp, *dx = dXb[r] + (i - begin) * Kp;
                int t = i - begin - key->exclusive;
                for (int k = 0; k < Kp; k++) run[k] += x[k] * dx[k];
                for (int k = 0; k < Kp && t >= 0; k++) dg[t * Kp + k] += run[k];
                NAME(times)(Kp, NAME(factor)(p, key, c->in, i, begin, ones), dx, dX[r] + i * Kp);
            }
        }
        /* pairs within the block: [3.3], and P_ij of [2.5] for each t between j and i [2.6] */
        for (int s = 0; s < p->columns; s++)
            for (int j = begin; j < end; j++)
                for (int k = 0; k < Kp; k += LANES) {
                    vector *y = (vector *)(c->Y[s] + j * Kp + k), run = *y, u = {0};
                    for (int i = j + 1; i < end; i++)
                        *(vector *)(w + (i - begin) * LANES) = run *= *(vector *)(c->d + i * Kp + k);
                    for (int i = end - 1; i >= j; i--) {
                        vector own = i > j ? *(vector *)(w + (i - begin) * LANES) : *y;
                        vector before = i > j + 1 ? *(vector *)(w + (i - 1 - begin) * LANES) : *y;
                        for (int r = 0; r < p->rows; r++)
                            if (!p->row[r].exclusive && (i > j || p->row[r].diagonal)) {
                                float a = dA[r][s][i * CHUNK + j];
                                u += a * *(vector *)(c->X[r] + i * Kp + k);
                                *(vector *)(dX[r] + i * Kp + k) += a * own;
                            }
                        if (i == j) break;
                        *(vector *)(dg + (i - begin) * Kp + k) += own * u;
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

/* Gradients of keys and decays, one decay per token, from those of pairs (`dA`), of keys as they meet the state (`dX`, `dY`, which
 * become those of the keys) and of the state's own factor, by channel. Long rows are left to `long_decays`, the state's factor with them.
 */
static void NAME(token_gradients)(const Problem *p, const NAME(Chunk) * c, float *const (*dA)[2], float *const *dX,
                                  float *const *dY, const float *total, long first) {
    int Kp = p->Kp, n = c->n, last = p->columns - 1;
    const float *to_end = c->E + (n - 1) * CHUNK;
    float P[CHUNK * CHUNK], of_rows[CHUNK] = {0}, later[CHUNK] = {0}; /* of log e^{G_i - G_j}, e^{G_i} [2.5] */
    memset(P, 0, sizeof P);
    for (int r = 0; r < p->rows; r++) /* row_i */
        for (int i = p->row[r].exclusive; i < (r ? c->begin : n); i++)
            of_rows[i - p->row[r].exclusive] += NAME(dot)(Kp, c->rows[r] + i * Kp, dX[r] + i * Kp);
    for (int s = 0; s < p->columns; s++) /* column_j, as pairs with the last token */
        for (int j = 0; j < (s == last ? c->begin : n); j++) P[(n - 1) * CHUNK + j] += NAME(dot)(Kp, c->columns[s] + j * Kp, dY[s] + j * Kp);
    for (int i = 0; i < p->K && c->begin == n; i++) of_rows[n - 1] += total[i]; /* total */
    for (int r = 0; r < p->rows; r++) NAME(scale_rows)(n, Kp, c->prefix, p->row[r].exclusive, dX[r], dX[r]); /* [6.4] */
    for (int s = 0; s < p->columns; s++) NAME(scale_rows)(n, Kp, to_end, 0, dY[s], dY[s]); /* [6.4] */
    for (int s = 0; s < p->columns; s++)
        for (int r = 0; r < p->rows; r++) {
            int exclusive = p->row[r].exclusive;
            for (int i = exclusive; i < (r && s == last ? c->begin : n); i++) /* P_ij = A_ij dA_ij */
                for (int j = 0; j < (i / LANES + 1) * LANES; j++)
                    P[(i - exclusive) * CHUNK + j] += c->A[r][s][i * CHUNK + j] * dA[r][s][i * CHUNK + j];
            NAME(decay_pairs)(&p->row[r], c->E, n, dA[r][s]); /* [3.3] */
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
        for (int i = 0; i < c->n; i++) { /* [6.5]: the row key is -k, the column key beta k */
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
