"""The library that the rule scripts share: one concept per module.

By the part of the chain that uses them:

config      config, config_errors, stages (which keys trigger which rule)
models      sources, hub, dequantizing, architecture, towers, tokenizer, weights
data        places, readers, json_text, utf8, values, formats, conversations, records, splits, tally
tokens      chat, thoughts, spans, encoding, examples, tokens, packing, pack_split, isolation
data check  lint, checks, lint_page
plan        outlook, shapes, attention, memory, activations, host, devices, gpu_models, batch,
            fitting, advice, neighbours, refusals, calibration, resources
launch      leases, nodes, processes, attempts, backoff, facts, history, outcome, deadline, peaks
cluster     cluster (asked by the Snakefile before the first job)
training    launched, training, arguments, modeling, quantizing, adapter, head, cross_entropy,
            compiling, varlen, trainer, collator, classification, sampling, scores, guards,
            checkpoints, counters, stopping, faults, watchdog, progress, metric_lines,
            training_record, heap
after it    merge_check, model_card, generation, halving, summary, figures
everywhere  cli, imports, files, pages, visible, parallel, provenance, out_of_memory
"""
