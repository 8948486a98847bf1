"""Models with any encoding, as transformers models: one file per family, behind the interface in `family`.

Importing this package registers them with transformers' Auto classes, which then open the folders that relpos writes:

from relpos.models import RelposLlamaConfig, RelposLlamaForCausalLM
from transformers import AutoModelForCausalLM

model = RelposLlamaForCausalLM(RelposLlamaConfig.preset("nano", position="cable", vocab_size=4096))
model.save_pretrained("my-llama")
model = AutoModelForCausalLM.from_pretrained("my-llama")

It registers relpos's attention too: `from_pretrained(…, attn_implementation="relpos")`.
"""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM

from relpos.model_catalogue import FAMILIES, PRESETS
from relpos.models.bert import RelposBertConfig, RelposBertForMaskedLM, RelposBertModel
from relpos.models.gpt2 import RelposGPT2Config, RelposGPT2ForCausalLM, RelposGPT2Model
from relpos.models.llama import RelposLlamaConfig, RelposLlamaForCausalLM, RelposLlamaModel
from relpos.models.named_attention import register as register_attention

__all__ = [
    "FAMILIES",
    "PRESETS",
    "RelposBertConfig",
    "RelposBertForMaskedLM",
    "RelposBertModel",
    "RelposGPT2Config",
    "RelposGPT2ForCausalLM",
    "RelposGPT2Model",
    "RelposLlamaConfig",
    "RelposLlamaForCausalLM",
    "RelposLlamaModel",
]

AutoConfig.register("relpos_bert", RelposBertConfig)
AutoModel.register(RelposBertConfig, RelposBertModel)
AutoModelForMaskedLM.register(RelposBertConfig, RelposBertForMaskedLM)

AutoConfig.register("relpos_gpt2", RelposGPT2Config)
AutoModel.register(RelposGPT2Config, RelposGPT2Model)
AutoModelForCausalLM.register(RelposGPT2Config, RelposGPT2ForCausalLM)

AutoConfig.register("relpos_llama", RelposLlamaConfig)
AutoModel.register(RelposLlamaConfig, RelposLlamaModel)
AutoModelForCausalLM.register(RelposLlamaConfig, RelposLlamaForCausalLM)

register_attention()
