"""TeleChat3-MoE: the whole language model and its losses."""

import mindspore as ms
from mindspore import Tensor, nn, ops

from telechat_moe.model.block import Block
from telechat_moe.model.by_source import LossBySource
from telechat_moe.model.dispatch import set_rows
from telechat_moe.model.linear import DTYPES, Linear, weight
from telechat_moe.model.mtp import MTPLayer, ShiftLeft
from telechat_moe.model.support import check_supported
from telechat_moe.ops.attention import AttentionMask
from telechat_moe.ops.cross_entropy import CrossEntropy
from telechat_moe.ops.matmul import carried, matmul
from telechat_moe.ops.norm import RMSNorm
from telechat_moe.ops.rope import rope_table
from telechat_moe.recipe import ModelConfig


class TableRows(nn.Cell):
    """Rows of a table: ``[V, H]`` and ``[T]`` ids to ``[T, H]``."""

    def __init__(self) -> None:
        super().__init__()
        self.gather = ops.Gather()

    def construct(self, table_VH: Tensor, id_T: Tensor) -> Tensor:
        """Return ``[T, H]``."""
        return self.gather(table_VH, id_T, 0)


class Embedding(nn.Cell):
    """Token embedding, ``[V, H]``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        shape = (config.vocab_size, config.hidden_size)
        params = DTYPES[config.params_dtype]
        self.weight = weight(shape, config.initializer_range, "weight", params)
        residual_fp32 = config.fp32_residual_connection
        self.dtype = ms.float32 if residual_fp32 else carried(DTYPES[config.compute_dtype])
        self.reshape = ops.Reshape()
        self.rows: nn.Cell = TableRows()
        self.to_residual = ops.Cast()

    def construct(self, id_BS: Tensor) -> Tensor:
        """Return ``[T, H]`` in the residual stream's data type."""
        rows = self.rows(self.weight, self.reshape(id_BS, (-1,)))
        return self.to_residual(rows, self.dtype)


class RopeTable(nn.Cell):
    """Cosine and sine of each token's position."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        cos, sin = rope_table(
            config.qk_rope_head_dim, config.max_position_embeddings, config.rope_theta
        )
        dtype = DTYPES[config.rotary_dtype]
        self.cos, self.sin = Tensor(cos).astype(dtype), Tensor(sin).astype(dtype)
        self.gather_cos = ops.Gather()
        self.gather_sin = ops.Gather()
        self.reshape = ops.Reshape()

    def construct(self, position_BS: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``(cos, sin)``, each ``[B, S, 1, R / 2]``."""
        B, S = position_BS.shape
        cos = self.gather_cos(self.cos, position_BS, 0)
        sin = self.gather_sin(self.sin, position_BS, 0)
        return self.reshape(cos, (B, S, 1, -1)), self.reshape(sin, (B, S, 1, -1))


class CausalLM(nn.Cell):
    """Mixture-of-experts language model with multi-latent attention and multi-token prediction.

    Activations between blocks are ``[T, H]`` with ``T = B * S``.

    Args:
        block_rows: ``telechat_moe.moe_block_rows`` of the recipe.
        capacity_tokens: ``telechat_moe.moe_capacity_tokens`` of the recipe.
        sources: Of the training data; where there are several, masks are marked (:mod:`telechat_moe.model.by_source`).

    Raises:
        BadInputError: The section asks for something that this model does not have.
    """

    def __init__(
        self,
        config: ModelConfig,
        block_rows: int | None = None,
        capacity_tokens: int | None = None,
        *,
        sources: int = 1,
    ) -> None:
        super().__init__()
        check_supported(config)
        self.config = config
        self.embedding: nn.Cell = Embedding(config)
        self.rope = RopeTable(config)
        self.mask = AttentionMask(config.num_attention_heads, DTYPES[config.compute_dtype])
        # Replaces it where a sequence goes through the layers in parts (telechat_moe.sharding).
        self.part_mask: nn.Cell | None = None
        self.layers = nn.CellList(
            [
                Block(config, i >= config.first_k_dense_replace)
                for i in range(config.num_hidden_layers)
            ]
        )
        norm_dtype = DTYPES[config.layernorm_compute_dtype]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, norm_dtype)
        self.tied = config.tie_word_embeddings
        compute = DTYPES[config.compute_dtype]
        if self.tied:
            self.carried = carried(compute)
            self.head_cast, self.head_table_cast = ops.Cast(), ops.Cast()
            self.head_matmul = matmul(compute)
        else:
            self.head = Linear(
                config.hidden_size,
                config.vocab_size,
                config.initializer_range,
                compute,
                DTYPES[config.params_dtype],
            )
        self.sums = config.calculate_per_token_loss
        self.loss: nn.Cell = CrossEntropy(self.sums)
        self.by_source: nn.Cell | None = LossBySource(sources) if sources > 1 else None
        self.sources = sources if sources > 1 else 0
        self.loss.by_token = self.loss.marked = sources > 1
        self.mtp_depth = config.num_nextn_predict_layers
        if self.mtp_depth:
            self.mtp = nn.CellList([MTPLayer(config) for _ in range(self.mtp_depth)])
            self.mtp_loss: nn.Cell = CrossEntropy(self.sums)
            self.mtp_loss.marked = sources > 1
            self.shift: nn.Cell = ShiftLeft()
            if self.sums:
                self.concat_mtp = ops.Concat()
            self.mtp_scale = Tensor([(config.mtp_loss_factor or 0.0) / self.mtp_depth], ms.float32)
        self.reshape = ops.Reshape()
        self.add_mtp = ops.Add()
        self.scale_mtp = ops.Mul()
        self.zero = Tensor([0.0], ms.float32)
        set_rows(self, block_rows, capacity_tokens)

    def hidden(
        self, id_BS: Tensor, position_BS: Tensor, mask_B1SS: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor, Tensor]]:
        """Return ``(hidden_TH, aux, (cos, sin, mask))``: normalised hidden states, balance losses."""
        cos, sin = self.rope(position_BS)
        if self.part_mask is not None:
            mask = self.part_mask(position_BS)
        else:
            mask = self.mask(id_BS.shape[0], id_BS.shape[1], mask_B1SS)
        x, aux = self.embedding(id_BS), self.zero
        for layer in self.layers:
            x, aux = layer(x, aux, cos, sin, mask)
        return self.norm(x), aux, (cos, sin, mask)

    def logits(self, hidden_TH: Tensor) -> Tensor:
        """Return ``[T, V]``."""
        if self.tied:
            table = self.head_table_cast(self.embedding.weight, self.carried)
            return self.head_matmul(self.head_cast(hidden_TH, self.carried), table)
        return self.head(hidden_TH)

    def construct(
        self,
        input_ids: Tensor,
        labels: Tensor,
        loss_mask: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None = None,
        ahead: tuple[Tensor, ...] = (),
    ) -> tuple[Tensor, ...]:
        """Return the three losses; training minimises their sum.

        Args:
            input_ids: ``[B, S]`` int32.
            labels: ``[B, S]`` int32, the next token of each.
            loss_mask: ``[B, S]`` fp32, 0 where a label does not count.
            position_ids: ``[B, S]`` int32.
            attention_mask: ``[B, 1, S, S]`` uint8, 1 = hidden; None = causal.
            ahead: Labels and their mask of each MTP depth in turn, for a part of a sequence, which does not hold the
                last ones.

        Returns:
            ``(lm, mtp, aux)``, each ``(1,)`` fp32: next-token cross-entropy, ``factor / depth`` times
            the sum of the MTP cross-entropies (DeepSeek-V3, equation 25), balance and z-losses. In training with
            ``calculate_per_token_loss`` the cross-entropies are sums over tokens, and ``mtp`` is ``[depth | 1]``, not
            scaled: only the step knows by how many tokens to divide. Of Z sources there is a fourth, ``[2 Z]``: see
            :class:`telechat_moe.model.by_source.LossBySource`.
        """
        hidden, aux, context = self.hidden(input_ids, position_ids, attention_mask)
        mask_T = self.reshape(loss_mask, (-1,))
        lm = self.loss(self.logits(hidden), self.reshape(labels, (-1,)), mask_T)
        sources = ()
        if self.by_source is not None:
            lm, token_T = lm
            sources = (self.by_source(token_T, mask_T),)
        mtp, depths = self.zero, ()
        if self.mtp_depth:
            next_id, label, keep = labels, labels, loss_mask
            for i, layer in enumerate(self.mtp):
                # Depth k reads token i + k, which is the label of depth k - 1, and predicts the next.
                embedding = layer.embed_norm(self.embedding(next_id))
                hidden, aux = layer(embedding, hidden, aux, *context)
                if self.part_mask is None:
                    label, keep = self.shift(label), self.shift(keep)
                else:
                    label, keep = ahead[2 * i], ahead[2 * i + 1]
                next_id = label
                loss = self.mtp_loss(
                    self.logits(hidden), self.reshape(label, (-1,)), self.reshape(keep, (-1,))
                )
                mtp = self.add_mtp(mtp, loss)
                depths += (loss,)
            mtp = self.scale_mtp(mtp, self.mtp_scale)
            if self.sums and self.training:
                # An odd number: MindSpore splits an even number of losses over devices.
                mtp = self.concat_mtp(depths if self.mtp_depth % 2 else (*depths, self.zero))
        return (lm, mtp, aux, *sources)


class Logits(nn.Cell):
    """Next-token logits of a model, without losses: ``[B, S]`` ids to ``[B * S, V]``."""

    def __init__(self, model: CausalLM) -> None:
        super().__init__(auto_prefix=False)  # the parameters keep the names that they have in model
        self.model = model

    def construct(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Return ``[T, V]``."""
        hidden, _, _ = self.model.hidden(input_ids, position_ids, None)
        return self.model.logits(hidden)
