"""How many instances a workload needs, planned before there are any: from a model's shape, an
accelerator's roofline as a law of time, and queues of prefills and decodes; and whether P/D pays
against fusion.
"""
