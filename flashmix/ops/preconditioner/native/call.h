/* The preconditioner of keys: sizes, operands, results. Tensors are contiguous: k, out, kept [tokens, heads, width], weight, g [tokens, heads],
 * log_scale [heads], states [sequences, heads, width]. Absent ones are null.
 */
typedef struct {
    int64_t sequences, heads, width, block, threads; /* block: heads that a thread takes at a time */
    const int64_t *starts; /* [sequences + 1], of tokens */
    const float *k, *weight, *g, *log_scale, *start;
    float *out, *last, *kept; /* kept: the curvature after each token; the backward reads it */
    const float *d_out, *d_last;
    float *dk, *dweight, *dg, *dscale, *d_start; /* dscale [sequences, heads] */
    double power, eps; /* power: -log(bound) */
} Preconditioner;
