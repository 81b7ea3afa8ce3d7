"""Recipes: the schema, reading YAML into it, building what it names, and whom to trust."""
