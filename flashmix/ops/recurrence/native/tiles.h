/* Tiles of float32 and what is done with them, for one instruction set: `recurrence.c` includes this once for each, with NAME(x)
 * the name of x there, and ROWS x COLUMNS the vectors that a product keeps in registers.
 *
 * A tile has its rows one after another, each a whole number of vectors long (`width`), the rest of the last one zero.
 */

#define INLINE static inline __attribute__((always_inline))

INLINE int NAME(smaller)(int a, int b) { return a < b ? a : b; }

/* C (+)= A B for `rows` x `columns` vectors of C that stay in registers; A has any strides. */
INLINE void NAME(block)(const int rows, const int columns, int depth, const float *A, long down, long across,
                        const float *B, long ldb, float *C, long ldc, int add) {
    vector sum[ROWS][COLUMNS];
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) sum[i][j] = (vector){0};
    for (int p = 0; p < depth; p++) {
        vector b[COLUMNS];
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) b[j] = *(const vector *)(B + p * ldb + j * LANES);
#pragma GCC unroll 16
        for (int i = 0; i < rows; i++) {
            float a = A[i * down + p * across];
#pragma GCC unroll 4
            for (int j = 0; j < columns; j++) sum[i][j] += a * b[j];
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int j = 0; j < columns; j++) {
            vector *to = (vector *)(C + i * ldc + j * LANES);
            if (add) sum[i][j] += *to; /* last: one by one onto what is there they err more */
            *to = sum[i][j];
        }
}

/* C (+)= A B for m rows and n numbers, a whole number of vectors. */
static void NAME(product)(int m, int n, int depth, const float *A, long down, long across, const float *B, long ldb,
                          float *C, long ldc, int add) {
    if (depth == 0 && !add)
        for (int i = 0; i < m; i++) memset(C + i * ldc, 0, sizeof(float) * n);
    for (int p = 0; p < depth; p += RUN) { /* longer runs of additions err more */
        int run = NAME(smaller)(RUN, depth - p), more = add || p, j = 0;
        const float *a = A + p * across, *b = B + p * ldb;
        for (; j + COLUMNS * LANES <= n; j += COLUMNS * LANES) {
            int i = 0;
            for (; i + ROWS <= m; i += ROWS)
                NAME(block)(ROWS, COLUMNS, run, a + i * down, down, across, b + j, ldb, C + i * ldc + j, ldc, more);
            for (; i < m; i++)
                NAME(block)(1, COLUMNS, run, a + i * down, down, across, b + j, ldb, C + i * ldc + j, ldc, more);
        }
        for (; j < n; j += LANES) {
            int i = 0;
            for (; i + ROWS <= m; i += ROWS)
                NAME(block)(ROWS, 1, run, a + i * down, down, across, b + j, ldb, C + i * ldc + j, ldc, more);
            for (; i < m; i++)
                NAME(block)(1, 1, run, a + i * down, down, across, b + j, ldb, C + i * ldc + j, ldc, more);
        }
    }
}

INLINE float NAME(sum)(vector x) {
    float y[LANES];
    memcpy(y, &x, sizeof y);
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2)
#pragma GCC unroll 8
        for (int i = 0; i < half; i++) y[i] += y[i + half];
    return y[0];
}

/* The transpose of 16 rows of 16 numbers, by halves: what is exchanged is 8, 4, 2, 1 rows apart. */
INLINE void NAME(turn)(const float *from, long ldf, float *to, long ldt) {
    vector x[LANES], y[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) x[i] = *(const vector *)(from + i * ldf);
#define EXCHANGE(x, y, apart)                                          \
    _Pragma("GCC unroll 16") for (int i = 0; i < LANES; i++) {         \
        if (i & apart) continue;                                       \
        y[i] = SHUFFLE(x[i], x[i + apart], LOW##apart);                \
        y[i + apart] = SHUFFLE(x[i], x[i + apart], HIGH##apart);       \
    }
    EXCHANGE(x, y, 8)
    EXCHANGE(y, x, 4)
    EXCHANGE(x, y, 2)
    EXCHANGE(y, x, 1)
#undef EXCHANGE
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) *(vector *)(to + i * ldt) = x[i];
}

/* `to` = the transpose of a tile of `rows` rows (`to` is wide enough for a whole number of vectors of them). */
static void NAME(transpose)(int rows, int width, const float *from, long ldf, float *to, long ldt) {
    for (int i = 0; i < rows; i += LANES)
        for (int j = 0; j < width; j += LANES) NAME(turn)(from + i * ldf + j, ldf, to + j * ldt + i, ldt);
}

/* `numbers` of each of `rows` rows, from `stride` to `stride`, into a tile whose other numbers and rows up to CHUNK are zero. */
static void NAME(load)(int rows, int numbers, const float *from, long stride, float scale, float *to, int width) {
    for (int i = 0; i < rows; i++) {
        for (int j = 0; j < numbers; j++) to[i * width + j] = scale * from[i * stride + j];
        for (int j = numbers; j < width; j++) to[i * width + j] = 0;
    }
    memset(to + rows * width, 0, sizeof(float) * (CHUNK - rows) * width);
}

static void NAME(store)(int rows, int numbers, const float *from, int width, float scale, float *to, long stride) {
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < numbers; j++) to[i * stride + j] = scale * from[i * width + j];
}

/* x <- (I - A)^{-1} x with A strictly lower triangular, or with `back` its transpose: blocks of rows, then row after row. */
static void NAME(solve)(int rows, int width, const float *A, float *x, int back) {
    for (int block = 0; block < rows; block += LANES) {
        int first = back ? (rows - 1) / LANES * LANES - block : block, last = NAME(smaller)(first + LANES, rows);
        if (!back && first)
            NAME(product)(last - first, width, first, A + first * CHUNK, CHUNK, 1, x, width, x + first * width, width, 1);
        if (back && last < rows)
            NAME(product)(last - first, width, rows - last, A + last * CHUNK + first, 1, CHUNK, x + last * width, width,
                          x + first * width, width, 1);
        for (int n = 1; n < last - first; n++) {
            int i = back ? last - 1 - n : first + n, from = back ? i + 1 : first;
            NAME(product)(1, width, (back ? last : i) - from, back ? A + from * CHUNK + i : A + i * CHUNK + from, 0,
                          back ? CHUNK : 1, x + from * width, width, x + i * width, width, 1);
        }
    }
}
