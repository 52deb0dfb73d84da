"""GPT-J: parallel attention and feed-forward network after one norm; RoPE rotates adjacent pairs.

Source: the model card of the release (2021) and its code; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks
from clearhead.checkpoints.hf.mapping.family import Family, Fixed, Key, Values
from clearhead.checkpoints.hf.mapping.tensor_rules import RotaryHalves, module_rule

SELF, FEED = blocks.function("decoder", 0), blocks.function("decoder", 0, 1)


def _model(c: Values) -> spec.Model:
    width, norm = c["n_embd"], spec.LayerNorm(eps=c["layer_norm_epsilon"])
    attention = blocks.attention(
        width,
        c["n_head"],
        mask=spec.Causal(),
        position=spec.Rotary(size=c["rotary_dim"]),
        bias=blocks.biases(False),
        dropout=c["attn_pdrop"],
    )
    network = spec.FeedForward(size=c["n_inner"] or 4 * width, activation=c["activation_function"])
    layers = [blocks.parallel(norm, attention, network, dropout=c["resid_pdrop"])] * c["n_layer"]
    return blocks.one_stack("decoder", width, c["vocab_size"], layers, norm, dropout=c["embd_pdrop"])


KEYS = (
    Key("vocab_size", 50400, "decoder.embedding.table.rows"),
    Key("n_embd", 4096, "decoder.width", aliases=("hidden_size",)),
    Key("n_layer", 28, blocks.count_layers("decoder"), aliases=("num_hidden_layers",)),
    Key("n_head", 16, f"{SELF}.num_heads", aliases=("num_attention_heads",)),
    Key("rotary_dim", 64, f"{SELF}.position.size"),
    Key("n_positions", 2048, "declared_length", aliases=("max_position_embeddings",)),
    Key("n_inner", None, f"{FEED}.size", kind=int),
    Key("activation_function", "gelu_new", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    Key("layer_norm_epsilon", 1e-5, "decoder.final_norm.eps"),
    Key("embd_pdrop", 0.0, "decoder.embedding.dropout"),
    Key("attn_pdrop", 0.0, f"{SELF}.dropout"),
    Key("resid_pdrop", 0.0, f"{blocks.branch('decoder', 0)}.dropout"),
    blocks.tying(False),
)

RULES = (
    module_rule("wte", "decoder.embedding.table"),
    module_rule("h.{layer}.ln_1", "decoder.layers.{layer}.steps.0.pre"),
    module_rule("h.{layer}.attn.q_proj", f"{SELF}.query", RotaryHalves()),
    module_rule("h.{layer}.attn.k_proj", f"{SELF}.key", RotaryHalves()),
    module_rule("h.{layer}.attn.v_proj", f"{SELF}.value"),
    module_rule("h.{layer}.attn.out_proj", f"{SELF}.out"),
    module_rule("h.{layer}.mlp.fc_in", f"{FEED}.up"),
    module_rule("h.{layer}.mlp.fc_out", f"{FEED}.down"),
    module_rule("ln_f", "decoder.final_norm"),
)

FAMILIES = (
    Family(
        model_type="gptj",
        keys=KEYS,
        model=_model,
        rules=RULES,
        variants=blocks.decoder_variants("GPTJ", "generate", "classify", "answer", "embed", bias=True),
        fixed=(
            blocks.CAUSAL,
            Fixed("rotary", (True,), "a decoder without rotary positions is not supported"),
            Fixed("scale_attn_weights", (True,), "unscaled scores are not supported"),
        ),
        # Settings for a head that no class has.
        inert=(
            "n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type",
            "summary_use_proj",
        ),
        prefix="transformer.",
        rows_key="n_positions",
        table="wte.weight",
        ignored=(r"h\.\d+\.attn\.(bias|masked_bias|embed_positions)",),
    ),
)  # fmt: skip
