"""`python -m flashmix.compat`: the table of names."""

from flashmix.compat.coverage import table

if __name__ == "__main__":
    print(table())
