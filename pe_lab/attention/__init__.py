"""Attention of queries, keys and values under the positional encoding of one layer."""

from pe_lab.attention.api import attention
from pe_lab.attention.dispatch import IMPLEMENTATIONS
from pe_lab.attention.hooks import Hooks
from pe_lab.attention.key_block import KeyRotation
from pe_lab.attention.kv_cache import CacheView, cached_attention
from pe_lab.attention.layer_encoding import LayerEncoding, encode_keys, encode_queries
