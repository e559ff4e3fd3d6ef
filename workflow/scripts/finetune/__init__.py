"""The library that the rule scripts share: one concept per module."""
