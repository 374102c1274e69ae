"""Write what is published from the schema of recipes: `docs/recipes.md` and `recipes/schema.json`."""
