/* The phases of a chunk, forward and backward, for one instruction set (see tiles.h); numbers in brackets are equations of
 * docs/chunk_algorithm.md.
 */

/* Prefetches rows of the next chunk: one head's are too far apart for the hardware prefetcher. */
static void NAME(prefetch)(const Problem *p, const float *tensor, long stride, int numbers, long next) {
    if (!tensor || next < 0) return;
    for (long i = next; i < p->tokens && i < next + CHUNK; i++)
        for (int j = 0; j < numbers; j += LANES) __builtin_prefetch(tensor + i * stride + j);
}

/* Keys, decays and pairs of the chunk that begins at token `first`; the next one begins at `next`. */
static void NAME(load_chunk)(const Problem *p, NAME(Chunk) * c, long first, long next) {
    c->n = c->begin = p->tokens - first < CHUNK ? (int)(p->tokens - first) : CHUNK;
    for (int r = 0; r < p->rows; r++) NAME(prefetch)(p, p->row[r].from, p->row[r].stride, p->K, next);
    for (int s = 0; s < p->columns; s++) NAME(prefetch)(p, p->column[s].from, p->column[s].stride, p->K, next);
    if (p->decay == CHANNEL_DECAY) NAME(prefetch)(p, p->g, p->HV * p->K, p->K, next);
    NAME(prefetch)(p, p->v, p->HV * p->V, p->V, next);
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
    (p->decay == CHANNEL_DECAY ? NAME(channel_pairs) : NAME(token_pairs))(p, c, first);
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

static void NAME(forward)(const void *given, int64_t sequence, int64_t head, float *memory) {
    const Call *call = given;
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
        if (p->corrected) { /* [4.1], then nu of [4.2] */
            float *nu = c->W[p->columns - 1];
            if (p->raw)
                memset(nu, 0, sizeof(float) * CHUNK * p->Vp);
            else
                NAME(load)(c->n, p->V, v, values, 1, nu, p->Vp);
            NAME(product)(c->n, p->Vp, p->K, c->rows[1], p->Kp, 1, S, p->Vp, nu, p->Vp, 1);
            if (p->raw) NAME(triangle)(c->n, c->A[1][0], c->W[0], p->Vp, nu, 0);
            NAME(correct)(p, c, first, nu, 0);
            if (call->nu) NAME(store)(c->n, p->V, nu, p->Vp, 1, call->nu + begin + first * values, values);
        }
        NAME(product)(c->n, p->Vp, p->K, c->rows[0], p->Kp, 1, S, p->Vp, Z, p->Vp, 0); /* [1.8], [1.9] */
        for (int s = 0; s < p->columns; s++) NAME(triangle)(c->n, c->A[0][s], c->W[s], p->Vp, Z, 0);
        NAME(store)(c->n, p->V, Z, p->Vp, (float)call->scale, call->o + begin + first * values, values);
        NAME(advance)(p, c, c->columns, c->W, p->columns, S);
    }
    NAME(store_state)(p, S, call->state + place);
}

static void NAME(backward)(const void *given, int64_t sequence, int64_t head, float *memory) {
    const Call *call = given;
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
        NAME(prefetch)(p, p->corrected ? call->nu + begin : 0, values, p->V, first - CHUNK);
        NAME(prefetch)(p, call->d_o ? call->d_o + begin : 0, values, p->V, first - CHUNK);
        int n = c->n;
        NAME(load_state)(p, call->states + ((p->first_chunk + first / CHUNK) * p->HV + head) * p->K * p->V, S);
        if (p->raw) NAME(load)(n, p->V, p->v + first * values, values, 1, c->W[0], Vp);
        if (p->corrected) NAME(load)(n, p->V, call->nu + begin + first * values, values, 1, c->W[last], Vp);
        if (call->d_o)
            NAME(load)(n, p->V, call->d_o + begin + first * values, values, (float)call->scale, dZ[0], Vp);
        else
            memset(dZ[0], 0, sizeof(float) * CHUNK * Vp);
        for (int s = 0; s < p->columns; s++) { /* dW by the output and by the state: [5.4], [6.3] */
            NAME(product)(n, Vp, p->K, c->columns[s], Kp, 1, dS, Vp, dW[s], Vp, 0);
            NAME(triangle)(n, c->A[0][s], dZ[0], Vp, dW[s], 1);
        }
        if (p->corrected) { /* dR of [5.5], then dZ of [5.6] */
            NAME(correct)(p, c, first, dW[last], 1);
            memcpy(dZ[1], dW[last], sizeof(float) * n * Vp);
            if (p->raw) NAME(triangle)(n, c->A[1][0], dZ[1], Vp, dW[0], 1);
        }
        NAME(store)(n, p->V, dW[0], Vp, 1, call->dv + begin + first * values, values);
        /* keys with the state [6.2] */
        NAME(transpose)(Kp, Vp, S, Vp, St, Kp);
        for (int r = 0; r < p->rows; r++) NAME(product)(n, Kp, p->V, dZ[r], Vp, 1, St, Kp, dX[r], Kp, 0);
        NAME(transpose)(Kp, Vp, dS, Vp, St, Kp);
        for (int s = 0; s < p->columns; s++) NAME(product)(n, Kp, p->V, c->W[s], Vp, 1, St, Kp, dY[s], Kp, 0);
        for (int s = 0; s < p->columns; s++) { /* keys with each other: dA of [6.1] */
            NAME(transpose)(CHUNK, Vp, c->W[s], Vp, Wt, CHUNK);
            for (int r = 0; r < p->rows; r++) NAME(lower)(n, p->V, dZ[r], Vp, Wt, dA[r][s]);
        }
        for (int i = 0; i < Kp; i++) total[i] = c->total[i] * NAME(dot)(Vp, S + i * Vp, dS + i * Vp); /* total of [2.5] */
        if (p->decay == CHANNEL_DECAY)
            NAME(channel_gradients)(p, c, dA, dX, dY, total, first);
        else
            NAME(token_gradients)(p, c, dA, dX, dY, total, first);
        if (p->decay == TOKEN_DECAY && p->dg && c->begin < n) NAME(long_decays)(p, c, first, S, dS, dZ[1], Wt, total);
        NAME(advance)(p, c, c->rows, dZ, p->rows, dS); /* [5.7] */
        NAME(store_keys)(p, c, dX, dY, first);
    }
    if (call->d_initial_state) NAME(store_state)(p, dS, call->d_initial_state + place);
}
