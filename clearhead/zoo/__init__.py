"""Architectures as data: recipes, presets and, later, checkpoint records."""

from clearhead.zoo import presets
from clearhead.zoo.presets import RECIPES
from clearhead.zoo.recipe import Recipe, resolve

__all__ = ["RECIPES", "Recipe", "presets", "resolve"]
