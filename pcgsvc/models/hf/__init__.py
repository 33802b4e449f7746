"""`model=hf`: any Hugging Face causal language model whose attention we can run."""
