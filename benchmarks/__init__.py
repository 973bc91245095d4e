"""Measurements: each script writes one JSON file to benchmarks/results, and render.py makes README's tables from those files.

``server.py`` starts and stops ``vllm serve``, ``load.py`` makes prompts and sends them, ``record.py`` writes results with the machine's name;
``demo.py`` is README's first command, ``serve_cpu.py`` compares decode throughput with stock vLLM.
"""
