"""Parts of a policy-gradient loss: log-ratios, surrogates, step weights, regularisers.

All are pure and per decision, [B, N] for B rows of N decisions. Those of some methods alone are in `forward_process`
and `sequence_losses`; those of texts in `text.losses`.
"""
