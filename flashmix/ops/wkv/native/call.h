/* RWKV-4's averages: sizes, operands, results. Tensors are contiguous: k, v, out [tokens, channels], states [sequences, channels], w, u
 * [channels]; `kept` is a, b and m before each token [3, tokens, channels]. Absent ones are null.
 */
typedef struct {
    int64_t sequences, channels, tokens, block, threads; /* block: channels that a thread takes at a time */
    const int64_t *starts; /* [sequences + 1], of tokens */
    const float *k, *v, *w, *u, *a, *b, *m;
    float *out, *last_a, *last_b, *last_m, *kept; /* the backward reads kept */
    const float *d_out, *d_a, *d_b;
    float *dk, *dv, *dw, *du, *d_start_a, *d_start_b; /* dw, du [sequences, channels] */
} Wkv;
