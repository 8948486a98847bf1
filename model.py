import relpos, torch
from torch import nn


class Attention(nn.Module):
    def __init__(self, width, heads, encoding):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.position = relpos.encoding(encoding, heads=heads, head_dim=width // heads)  # an nn.Module

    def forward(self, x, causal=True, cache=None):
        qkv = self.qkv(x).unflatten(-1, (3, self.heads, -1))  # (batch, length, 3, heads, head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (batch, heads, length, head_dim), not rotated
        out = relpos.attention(q, k, v, self.position, hidden=x, causal=causal, cache=cache)
        return self.out(out.transpose(1, 2).flatten(2))  # (batch, length, width)

x = torch.randn(2, 10, 48)  # (batch, length, width)
for name in ("alibi", "rope", "cable", "t5"):
    assert Attention(48, 4, name)(x).shape == (2, 10, 48)

class Block(nn.Module):
    def __init__(self, width, heads, encoding):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, encoding)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x, causal=True, cache=None):
        x = x + self.attention(self.norm1(x), causal, cache)  # the encoding reads the normalised input
        return x + self.mlp(self.norm2(x))


class Decoder(nn.Module):
    def __init__(self, vocabulary, width=48, heads=4, layers=2, encoding="cable"):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, encoding) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, ids, caches=None):
        x = self.tokens(ids)
        for layer, block in enumerate(self.blocks):
            x = block(x, cache=None if caches is None else caches[layer])
        return self.head(self.norm(x))  # (batch, length, vocabulary)

torch.manual_seed(0)
model = Decoder(vocabulary=64)
own = [p for block in model.blocks for p in block.attention.position.parameters()]
rest = [p for p in model.parameters() if not any(p is q for q in own)]
groups = [{"params": rest, "weight_decay": 0.1}, {"params": own, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3)

ids = torch.arange(64).repeat(2)[None, :96]  # a text that is easy to learn: each token follows the one before
losses = []
for step in range(30):
    loss = nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[0, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] / 2

with torch.no_grad():
    assert model(torch.randint(64, (1, 1000))).shape == (1, 1000, 64)

@torch.no_grad()
def generate(model, prompt, new_tokens):
    caches = [relpos.Cache() for _ in model.blocks]
    ids, logits = prompt, model(prompt, caches)  # the prompt at once …
    for _ in range(new_tokens):
        new = logits[:, -1:].argmax(-1)
        ids = torch.cat([ids, new], dim=1)
        logits = model(new, caches)  # … then one token at a time
    return ids


written = generate(model.eval(), torch.tensor([[5, 6, 7]]), new_tokens=5)

with torch.no_grad():
    caches = [relpos.Cache() for _ in model.blocks]
    steps = torch.cat([model(ids[:, t : t + 1], caches) for t in range(20)], dim=1)
    assert torch.allclose(steps, model(ids[:, :20]), atol=1e-4)
assert len(caches[0]) == 20

attention = model.blocks[0].attention
x = torch.randn(1, 10, 48)
with torch.no_grad():
    q, k, v = attention.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
    gates = attention.position.gates(x)  # (batch, heads, length, gate_size): keep them with k and v; else None
    last = relpos.attention(q[:, :, -1:], k, v, attention.position, gates=gates)  # one query, all keys
    whole = relpos.attention(q, k, v, attention.position, hidden=x)
assert torch.allclose(last, whole[:, :, -1:], atol=1e-5)

position = relpos.encoding("learned", heads=4, head_dim=12, length=128)  # width = heads × head_dim, or width=
x = torch.randn(1, 6, 48)
whole = position.embed(x)  # positions 0 … 5
step = position.embed(x[:, 5:], start=5)  # the sixth token by itself; with a cache, start=cache.length before the step
assert torch.equal(whole[:, 5:], step)

block = Block(48, 4, "alibi")
both = block(torch.randn(2, 10, 48), causal=False)

q, k, v = torch.randn(3, 2, 4, 10, 12)
padding = torch.arange(10) < torch.tensor([[10], [7]])  # the second sentence has 7 tokens
out = relpos.attention(q, k, v, block.attention.position, causal=False, padding=padding)

try:
    relpos.attention(q, k, v, relpos.encoding("cope", heads=4, head_dim=12), causal=False)
except ValueError as error:
    assert "causal attention only" in str(error)

picture = relpos.draw(model.blocks[-1].attention.position, length=64)
picture.save("cable.png")
