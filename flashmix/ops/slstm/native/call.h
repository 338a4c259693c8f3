/* One sLSTM: its sizes, its operands, its results. Tensors are contiguous: gates and `out` [tokens, heads,
 * channels], states [sequences, heads, channels]. `recurrent` holds the matrices of a head in panels of PANEL columns, each row by row:
 * forward the rows are channels of y and the columns the logits, 4 gates of whole vectors; backward the other way round. Absent ones are null.
 */
typedef struct {
    int64_t sequences, heads, channels, tokens, threads;
    const int64_t *starts; /* [sequences + 1], of tokens */
    const float *write, *forget, *candidate, *output, *recurrent, *c, *n, *m, *y;
    float *out, *last_c, *last_n, *last_m, *last_y;
    float *logits, *states; /* [4, tokens, heads, channels], and c, n, m of each token [3, tokens, heads, channels]: the backward reads them */
    const float *d_out, *d_c, *d_n, *d_y;
    float *d_logits, *d_start_c, *d_start_n, *d_start_y;
} Slstm;

#define PANEL 64 /* columns of a matrix that a pass keeps in registers */
