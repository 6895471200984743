"""Structured output: grammars that the tokens of a sequence cannot violate."""
