"""DeepSpeed-Ulysses: a module that is built and called like `deepspeed.sequence.layer.DistributedAttention`.

Tokens stay where Ulysses has them: rank r holds the r-th run of the sequence. Heads need not be divisible by ranks. It
does not import DeepSpeed.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from mesh_attention.api import attention_of
from mesh_attention.arguments import describe, refuse_decided
from mesh_attention.errors import ProblemError, UsageError

HEADS_DIM = 2


class MeshDistributedAttention(nn.Module):
    """Attention of tensors whose tokens are spread over `sequence_process_group`, in runs.

    `local_attention` must be None: mesh attention computes what it would. `call` says what that is, with the arguments
    of a MeshAttention's call, such as ``{"causal": True}``. `options` are those of `MeshAttention`.
    """

    def __init__(
        self,
        local_attention: None,
        sequence_process_group: ProcessGroup,
        scatter_idx: int = HEADS_DIM,
        gather_idx: int = 0,
        sp_stream: None = None,
        num_kv_heads: int | None = None,
        *,
        call: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if local_attention is not None:
            raise UsageError(
                f"local_attention is a {type(local_attention).__name__}: expected None, because mesh attention takes "
                'its place; say what it computes instead, such as call={"causal": True}'
            )
        if scatter_idx != HEADS_DIM or gather_idx not in (0, 1):
            raise UsageError(
                f"scatter_idx={scatter_idx}, gather_idx={gather_idx}: expected heads in dim 2, and tokens in dim 0 or 1"
            )
        if sp_stream is not None:
            raise UsageError("sp_stream is not supported: transfers overlap with compute anyway; leave it out")
        refuse_decided(options, "Ulysses decides the order of tokens; give method=, tile= or ulysses_degree= instead")
        if "return_lse" in (call or {}):
            raise UsageError("return_lse cannot be given here: the module returns the output alone; leave it out")
        self.gather_idx, self.num_kv_heads, self.call = gather_idx, num_kv_heads, dict(call or {})
        self.attention = attention_of(sequence_process_group, layout="contiguous", **options)

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, batch_dim_idx: int, rotary_pos_emb: None = None, *args: Any
    ) -> Tensor:
        """This rank's output, in the form of `query`."""
        with self.attention.session.telling():
            self._check(query, key, batch_dim_idx, rotary_pos_emb, args)
        is_tokens_first = self.gather_idx == 0
        tensors = [tensor.transpose(0, 1) if is_tokens_first else tensor for tensor in (query, key, value)]
        out: Tensor = self.attention(*tensors, **self.call)
        return out.transpose(0, 1) if is_tokens_first else out

    def _check(self, query: Tensor, key: Tensor, batch_dim_idx: int, rotary: object, others: tuple[Any, ...]) -> None:
        if query.dim() != 4 or key.dim() != 4:
            form = "(tokens, batch, heads, dim)" if self.gather_idx == 0 else "(batch, tokens, heads, dim)"
            raise ProblemError(f"query is {describe(query)} and key {describe(key)}: expected {form}")
        if batch_dim_idx != 1 - self.gather_idx:
            raise UsageError(
                f"batch_dim_idx={batch_dim_idx} with gather_idx={self.gather_idx}: expected {1 - self.gather_idx}, "
                "because tokens and batch are dims 0 and 1"
            )
        if rotary is not None:
            raise UsageError(
                "rotary_pos_emb is not supported, because no rank has the whole sequence; rotate query and key before "
                "the call, by the positions of this rank's tokens"
            )
        if any(other is not None for other in others):
            raise UsageError(
                f"got {len(others)} arguments for local_attention, which is not called; say what it computes with call="
            )
        if self.num_kv_heads not in (None, key.shape[HEADS_DIM]):
            raise UsageError(f"num_kv_heads={self.num_kv_heads}, but key has {key.shape[HEADS_DIM]} heads")
