"""The hooked files of a tree in our own words: only the statements that hooks look for, and lookalikes."""

from __future__ import annotations

ENVIRON = "sglang/srt/environ.py"
MODEL = "sglang/srt/models/deepseek_v4.py"
INDEXER = "sglang/srt/layers/attention/dsv4/indexer.py"
RUNNER = "sglang/srt/model_executor/runner/decode_cuda_graph_runner.py"

MODEL_SOURCE = b"""
class MQALayer:
    def _forward_prepare_multi_stream(self, x, attn_backend):
        if self.fused:
            qkv_a = self.first(x)
            qkv_a_ready = stream.record_event()
        q_lora = self.second(x)
        q_lora_ready = stream.record_event()
        with other(stream):
            # stores it
            self._compute_kv_to_cache(x, qkv_a=qkv_a)
        with other(stream):
            attn_backend.forward_core_compressor(x, self)
        return q_lora

    def _forward_prepare_other(self, x, attn_backend):
        qkv_a_ready = stream.record_event()
        q_lora_ready = stream.record_event()
        self._compute_kv_to_cache(x)
        attn_backend.forward_core_compressor(x, self)
"""

INDEXER_SOURCE = b"""
class C4IndexerBackendMixin:
    def _forward_prepare_multi_stream(self, x, q_lora, c4_indexer, positions):
        self.forward_indexer_compressor(x=x)
        with other(stream):
            weights = c4_indexer.compute_weights(x)
            q, weights = c4_indexer.compute_q(q_lora, positions, weights)
        return q, weights

    def _forward_prepare_normal(self, x, q_lora, c4_indexer, positions):
        q, weights = c4_indexer.compute_q(q_lora, positions, 1)
        if x:
            self.forward_indexer_compressor(x=x)
        return q, weights

    def forward_c4_indexer(self, x, c4_indexer):
        logits = other(1, 2, 3, 4, 5, 6, 7, 8)

        def run(rows, metadata):
            logits = fn(
                q[rows],
                cache,
                weights[rows],
                lengths[rows],
                table[rows],
                metadata,
                self.longest,
                False,
            )
            return logits

        return run(slice(0, 1), None)
"""

RUNNER_SOURCE = b"""
class DecodeCudaGraphRunner:
    def capture_one_shape(self, size, forward):
        def run_once():
            return forward()

        with context():
            shape_key = self.make(size)
            # the capture itself
            self.backend.capture_one(
                shape_key,
                run_once,
            )

    def execute(self, forward_batch):
        with context():
            self.load_batch(forward_batch)
            output = self.backend.replay(self._replay_graph_key, forward_batch)
            done()
        return output


class Other:
    def execute(self, forward_batch):
        output = self.backend.replay(self._replay_graph_key, forward_batch)
        return output
"""

REST = {MODEL: MODEL_SOURCE, INDEXER: INDEXER_SOURCE, RUNNER: RUNNER_SOURCE}
"""Every hooked file but environ.py."""
