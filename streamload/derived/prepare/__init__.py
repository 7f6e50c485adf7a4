"""Images prepared in advance, `Images(prepare=…)`: the recipe, the shards it makes, the choice of one."""
