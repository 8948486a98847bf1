"""Training a model."""
