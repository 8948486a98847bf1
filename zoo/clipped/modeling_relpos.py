"""The package relpos opens this model: pip install relpos, and import relpos.models first."""

try:
    from relpos.models import RelposGPT2Config, RelposGPT2Model, RelposGPT2ForCausalLM
except ImportError as error:
    raise ImportError(
        "this model needs the package relpos: pip install relpos, and import relpos.models before opening it. "
        f"(What was missing: {error}.)"
    ) from None
