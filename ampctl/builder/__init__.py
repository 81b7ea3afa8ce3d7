"""From a recipe to a state and its data, and what of a recipe is refused on the way."""
