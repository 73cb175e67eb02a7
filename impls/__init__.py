"""Attention implementations: this project's own, and adapters around published ones (`impls.libraries`).

They import `cases` and the contract (`impls.contract`), and never the oracle or the checks. `impls.catalogue` lists
them. What families of kernels share is in `block_arithmetic`, `softmax_merge`, `pallas_tpu` and `pallas_gpu`.

Each of them computes the following, for a query `i`, the keys `j` of its key/value head, and the sink of its query
head. Comments in the kernels refer to these numbers. Terms of operands that are not given are left out.

    (1)  x_ij = scale <q_i, k_j> + bias_ij
    (2)  z_ij = soft_cap tanh(x_ij / soft_cap)
    (3)  z_ij = -inf, where i may not attend to j
    (4)  m_i = max(max_j z_ij, sink)
    (5)  l_i = sum_j exp(z_ij - m_i) + exp(sink - m_i)
    (6)  out_i = sum_j exp(z_ij - m_i) v_j / l_i
    (7)  logsumexp_i = m_i + log(l_i)

Without a soft cap, (2) is `z_ij = x_ij`. The residual `max_logits` is (4) without the sink. The backward pass gets the
cotangents `dout` and `dlse` of `out` and `logsumexp`, and computes:

    (8)  p_ij = exp(z_ij - logsumexp_i)
    (9)  dv_j = sum_i p_ij dout_i
    (10) dp_ij = <dout_i, v_j>
    (11) D_i = <out_i, dout_i>
    (12) dz_ij = p_ij (dp_ij - D_i + dlse_i)
    (13) dx_ij = dz_ij (1 - tanh(x_ij / soft_cap)^2)
    (14) dq_i = scale sum_j dx_ij k_j
    (15) dk_j = scale sum_i dx_ij q_i
    (16) dbias = dx, summed over the axes along which the bias is broadcast
    (17) dsink = sum_i exp(sink - logsumexp_i) (dlse_i - D_i)

The sums of (9) and (15) run over the queries of all query heads that share the key/value head. The kernels take
`D - dlse` as one number per query, called the row sum.

A flash kernel visits the keys block by block, and keeps m, l and the sum of (6) over the keys visited so far. A block
that raises m multiplies the old l and the old sum by `exp(old m - new m)`. The division of (6) is done once, at the
end.
"""
