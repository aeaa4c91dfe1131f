"""A consortium: user 0 and sites of other organisations, provisioned and connected by NVFLARE.

project ──► user 0's folder ──► server ──► user0 (trains, asks)
    └─────► a folder a site ──► client ──► site (answers, within its caps)
"""
