"""The stand-in engine: behaves as an SGLang server where this project looks at one, without a GPU."""
