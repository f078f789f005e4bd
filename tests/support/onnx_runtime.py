"""Exported graphs in ONNX Runtime."""

import torch


class Runtime:
    """The graphs of a network and their description, as `onnx_pair.OnnxPair` or the files have them."""

    def __init__(self, encode, decode_step, description):
        import onnxruntime

        self.description = description
        self.graphs = {
            name: onnxruntime.InferenceSession(graph, providers=["CPUExecutionProvider"])
            for name, graph in (("encode", encode), ("decode_step", decode_step))
            if graph is not None
        }
        layers = description["attention"]
        self.head_mask = torch.ones(len(layers), max([layer["heads"] for layer in layers], default=1))

    def run(self, graph, **inputs):
        """Return the outputs of a graph by name, given tensors by name, some of which it may not read."""
        session = self.graphs[graph]
        inputs = {"head_mask": self.head_mask} | inputs
        values = session.run(None, {value.name: inputs[value.name].numpy() for value in session.get_inputs()})
        return {value.name: torch.from_numpy(array) for value, array in zip(session.get_outputs(), values, strict=True)}

    def encode(self, source, **inputs):
        """Return the outputs of encode by name, and the state."""
        outputs = self.run("encode", source=source, **inputs)
        return outputs, {name: outputs[name] for name in self.description["state"]}

    def decode_step(self, token, state, **inputs):
        """Return the outputs of decode_step by name, and the next state."""
        outputs = self.run("decode_step", token=token, **state, **inputs)
        names = self.description["state"]
        return outputs, {name: outputs[after] if (after := names[name]) else state[name] for name in names}

    def forward(self, **inputs):
        """Return the logits of the network's `forward` for the same arguments, step by step if it is a decoder."""
        if "decode_step" not in self.graphs:
            return self.run("encode", **inputs)["logits"]
        _, state = self.encode(inputs["source"])
        steps = []
        for token in inputs["target_in"].unbind(1):
            outputs, state = self.decode_step(token, state)
            steps.append(outputs["logits"])
        return torch.stack(steps, dim=1)
