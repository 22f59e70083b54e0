"""Count the FLOPs of all packaged recipes and write ``amos_fairseq/recipes/costs.tsv``: run it after a recipe has changed."""

import csv
import io

import amos_fairseq
from amos_fairseq.files import write_text
from amos_fairseq.flops import count_costs
from amos_fairseq.recipes import COSTS, RECIPES, packaged_recipes

COLUMNS = ("recipe", "layers", "width", "length", "vocabulary_size", "max_update", "tokens", "flops", "not_counted")


def main() -> None:
    amos_fairseq.register()
    table = io.StringIO()
    writer = csv.DictWriter(
        table, COLUMNS, restval="", delimiter="\t", quoting=csv.QUOTE_NONE, quotechar=None, lineterminator="\n"
    )
    writer.writeheader()
    for name in packaged_recipes() + packaged_recipes("variants/*.yaml"):
        writer.writerow({"recipe": name} | count_costs(name, RECIPES))
    write_text(COSTS, table.getvalue())


if __name__ == "__main__":
    main()
