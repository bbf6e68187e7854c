import sys
from tests.compositions.check import check_all, as_test
from tests.compositions.composition import Composition, AXES
from tests.compositions.cover import sample
import random
if __name__=="__main__":
    draw=random.Random(int(sys.argv[1])); out=[]
    for layout in sys.argv[2].split(","):
        for _ in range(int(sys.argv[3])):
            v={a:draw.choice(x) for a,x in AXES.items()}
            v.update(wrapper="zero3",layout=layout)
            out.append(Composition(**v).settled())
    bad=check_all(out)
    for c,m in bad.items():
        print(c); print(m[-1500:]); print("-----")
    print(len(out),"drawn",len(bad),"bad")
