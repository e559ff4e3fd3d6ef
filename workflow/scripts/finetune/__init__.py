"""The library that the rule scripts share: one concept a module."""
