"""How many instances a workload needs before there are any: a model's shape, an accelerator's
roofline as a law of time, queues of prefills and decodes, and whether P/D pays against fusion.
"""
