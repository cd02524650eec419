"""Tokens of several prompts as they come, from one continuously batched engine, without Ray."""

from serve_app import LocalModel

model = LocalModel.load("builtin")
prompts = ["The capital of France is", "Water boils at", "The opposite of hot is"]
for piece in model.stream(prompts, max_tokens=12, temperature=0):
    print(piece.index, repr(piece.delta.text))
print(model.complete(prompts, max_tokens=12, temperature=0))
model.close()
