"""Architectures as data: recipes, presets and, later, checkpoint records."""

from clearhead.zoo import presets
from clearhead.zoo.heads import label_head, token_head, vector_head, with_head
from clearhead.zoo.presets import RECIPES
from clearhead.zoo.recipe import Recipe, resolve

__all__ = ["RECIPES", "Recipe", "label_head", "presets", "resolve", "token_head", "vector_head", "with_head"]
