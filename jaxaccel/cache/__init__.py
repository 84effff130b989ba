"""What a model keeps between calls: keys and values, recurrent states.

An attention layer's past is kept by a policy, a frozen config that gin can name. A
`CachePlanConfig` says which layer has which; `jaxaccel.decoding.cached` makes the
caches and reads prompts into them.

  DenseCacheConfig      all tokens, all of them read
  PagedCacheConfig      the same, in pages that rows take as they grow
  StreamingCacheConfig  the first tokens and the newest
  H2OCacheConfig        the tokens that got the most attention, and the newest
  SnapKVCacheConfig     the prompt's tokens that its last queries attend to
  QuestCacheConfig      all tokens; pages are read by an upper bound on their scores
  ShadowKVCacheConfig   keys of low rank, values in host memory; chunks are read by
                        their mean keys

What one reads never depends on what was read before, a schedule and H2O's sums apart:
what moves between memories is copied, and keys of low rank are computed anew.
`reference` holds each method as it is defined, without fixed shapes.

Without a plan, a decoder keeps all tokens in a `KVCache`.
"""
