"""From the [model] table of a run file to the spec of a model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from clearhead.errors import InputError, nearest
from clearhead.spec import Model
from clearhead.train.runfile_sections import ModelSection
from clearhead.train.text_file import read_text_file
from clearhead.zoo import RECIPES, Recipe, resolve

DEFAULT_PRESET = "transformer"


def resolve_spec(section: ModelSection, *, source_vocab: int, target_vocab: int, joint: bool) -> Model:
    """Return the spec that a [model] table means for vocabularies of these sizes.

    Args:
        section: the checked table.
        source_vocab: rows of the source vocabulary.
        target_vocab: rows of the target vocabulary.
        joint: whether both sides have one vocabulary, so that their tables can be shared.

    Raises:
        InputError: every size that is impossible, or does not fit the vocabularies.
    """
    if section.spec is not None:
        path = Path(section.spec)
        try:
            model = Model.from_json(read_text_file(path, "spec file"))
        except InputError as error:
            raise InputError(f"{path}: {error}") from None
        if model.encoder is None or model.decoder is None or model.head is None:
            raise InputError(f"{path}: the task 'translate' needs a spec with an encoder, a decoder and a head")
        return model
    return resolve(_recipe(section, joint), source_vocab=source_vocab, target_vocab=target_vocab)


def _recipe(section: ModelSection, joint: bool) -> Recipe:
    """Put what the table gives over the preset's values."""
    preset = section.preset or DEFAULT_PRESET
    if preset not in RECIPES:
        raise InputError(f"there is no preset '{preset}'{nearest(preset, RECIPES)}; there are {', '.join(RECIPES)}")
    recipe = RECIPES[preset]
    if recipe.family != "encoder-decoder":
        raise InputError(f"the preset '{preset}' has only one stack; the task 'translate' needs an encoder-decoder")
    given = section.model_dump(exclude={"preset", "spec", "family"}, exclude_none=True)
    if not joint:
        given = {"tie": "decoder", **given}
    recipe = replace(recipe, **given)
    if section.max_positions is not None and recipe.positions != "learned":
        raise InputError(
            f"max_positions has no effect with {recipe.positions} positions, which have no limit; remove it, "
            "or set positions = 'learned'"
        )
    return recipe
