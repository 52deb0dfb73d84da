"""GPT-2: learned positions, pre-norm layers, query, key and value in one projection, matrices stored transposed.

Source: the GPT-2 report, section 2.3; tensor names are those of released checkpoints.
"""

from __future__ import annotations

from clearhead import spec
from clearhead.checkpoints.hf.mapping import blocks, layer_types
from clearhead.checkpoints.hf.mapping.family import Family, Key, Values
from clearhead.checkpoints.hf.mapping.tensor_rules import SplitRows, Transpose, module_rule

SELF, FEED = blocks.function("decoder", 0), blocks.function("decoder", 1)


def _model(c: Values) -> spec.Model:
    width, heads = c["n_embd"], c["n_head"]
    norm = spec.LayerNorm(eps=c["layer_norm_epsilon"])
    scale = (width // heads) ** -0.5 if c["scale_attn_weights"] else 1.0
    network = spec.FeedForward(size=c["n_inner"] or 4 * width, activation=c["activation_function"])

    def layer(index: int) -> spec.Layer:
        layer_scale = scale / (index + 1) if c["scale_attn_by_inverse_layer_idx"] else scale
        attention = blocks.attention(width, heads, mask=spec.Causal(), scale=layer_scale, dropout=c["attn_pdrop"])
        return blocks.layer(norm, attention, network, dropout=c["resid_pdrop"])

    layers = [layer(index) for index in range(c["n_layer"])]
    position = spec.Learned(rows=c["n_positions"])
    model = blocks.one_stack(
        "decoder", width, c["vocab_size"], layers, norm, position=position, dropout=c["embd_pdrop"]
    )
    return model.model_copy(update={"initialization": spec.Normal()})


def _scale(model: spec.Model, layer: int) -> float:
    attention = layer_types.attentions(model)[layer]
    return attention.head_size**-0.5 if attention.scale is None else attention.scale


KEYS = (
    Key("vocab_size", 50257, "decoder.embedding.table.rows"),
    Key("n_positions", 1024, "decoder.embedding.position.rows", aliases=("max_position_embeddings",)),
    Key("n_embd", 768, "decoder.width", aliases=("hidden_size",)),
    Key("n_layer", 12, blocks.count_layers("decoder"), aliases=("num_hidden_layers",)),
    Key("n_head", 12, f"{SELF}.num_heads", aliases=("num_attention_heads",)),
    Key("n_inner", None, f"{FEED}.size", kind=int),
    Key("activation_function", "gelu_new", f"{FEED}.activation", names=blocks.ACTIVATIONS),
    Key("layer_norm_epsilon", 1e-5, "decoder.final_norm.eps"),
    Key("embd_pdrop", 0.1, "decoder.embedding.dropout"),
    Key("attn_pdrop", 0.1, f"{SELF}.dropout"),
    Key("resid_pdrop", 0.1, f"{blocks.branch('decoder', 0)}.dropout"),
    Key("scale_attn_weights", True, lambda model: _scale(model, 0) != 1.0),
    Key("scale_attn_by_inverse_layer_idx", False, lambda model: _scale(model, 0) != _scale(model, -1)),
    blocks.tying(True),
)

RULES = (
    module_rule("wte", "decoder.embedding.table"),
    module_rule("wpe", "decoder.embedding.position"),
    module_rule("h.{layer}.ln_1", f"{blocks.branch('decoder', 0)}.pre"),
    module_rule("h.{layer}.attn.c_attn", (f"{SELF}.query", f"{SELF}.key", f"{SELF}.value"), Transpose(), SplitRows()),
    module_rule("h.{layer}.attn.c_proj", f"{SELF}.out", Transpose()),
    module_rule("h.{layer}.ln_2", f"{blocks.branch('decoder', 1)}.pre"),
    module_rule("h.{layer}.mlp.c_fc", f"{FEED}.up", Transpose()),
    module_rule("h.{layer}.mlp.c_proj", f"{FEED}.down", Transpose()),
    module_rule("ln_f", "decoder.final_norm"),
)

FAMILIES = (
    Family(
        model_type="gpt2",
        keys=KEYS,
        model=_model,
        rules=RULES,
        prefix="transformer.",
        table="wte.weight",
        variants=blocks.decoder_variants("GPT2", causal_lm="LMHeadModel"),
        # Numerics in half precision, and settings of a multiple-choice head that none of the variants has.
        inert=(
            "reorder_and_upcast_attn", "n_ctx", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
            "summary_type", "summary_use_proj", "classifier_dropout", "hidden_dropout",
        ),
        fixed=(blocks.CAUSAL,),
        ignored=(r"h\.\d+\.attn\.(bias|masked_bias)",),
        # The class's default ids are those of the released vocabulary, which another need not have.
        written_keys={"bos_token_id": None, "eos_token_id": None},
    ),
)  # fmt: skip
