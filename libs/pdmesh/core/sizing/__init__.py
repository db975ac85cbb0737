"""Plans how many instances a workload needs, before there are any.

A plan uses the model's shape, a formula for step times from the accelerator's roofline, and queues
of prefills and decodes. It also answers whether P/D, with prefill and decode on different
instances, pays compared with fusion, where each instance does both.
"""
