/* One scan: its sizes, its operands, its results. Tensors are contiguous, [tokens, channels] and [sequences, channels]; absent ones are
 * null. `g` and `dg` have a number for each channel of a token, for each head of `width` channels, or are the same for all tokens: then
 * `g` is [channels] and `dg` [sequences, channels].
 */
typedef struct {
    int64_t sequences, channels, width, block; /* block: channels that a thread takes at a time, whole heads */
    int64_t decay, read_before, maximum, turning, coupling, threads; /* maximum: h <- max(h + g, x); turning: see complex.h */
    const int64_t *starts; /* [sequences + 1], of tokens */
    const float *x, *g, *initial_state;
    float *h, *state; /* the backward reads h, and with a coupling x */
    const float *d_h, *d_state;
    float *dx, *dg, *d_initial_state;
} Scan;

enum { BY_CHANNEL, BY_HEAD, CONSTANT };
enum { REAL, TURNING, FACTORS };
enum { COMPLEMENT = 1, ROOT, LOGIT };
