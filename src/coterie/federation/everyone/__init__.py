"""A model for every site.

Each trains its own and answers the others; the server passes messages on.

site ──► asks the others through the server ──► trains, judges and keeps its own model
     ◄── is asked by them                   ──► answers, within its caps
"""
