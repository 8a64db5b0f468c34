package arrows

import (
	"bytes"
	"encoding/json"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/kasway/kasway/"

// allowed lists, for every package, which of ours it may import. An importer
// stands above what it imports; a new package must be put in here.
var allowed = map[string][]string{
	"pkg/dial":                {},
	"pkg/rules":               {"pkg/observe"},
	"pkg/observe":             {},
	"pkg/certs":               {},
	"pkg/workload":            {},
	"pkg/tunnel/tunnelpb":     {},
	"pkg/config":              {"pkg/rules", "pkg/certs"},
	"pkg/tunnel":              {"pkg/tunnel/tunnelpb", "pkg/dial", "pkg/observe"},
	"pkg/access":              {"pkg/dial", "pkg/observe"},
	"pkg/upstream":            {"pkg/dial", "pkg/observe"},
	"pkg/intercept":           {"pkg/rules", "pkg/dial", "pkg/observe", "pkg/workload"},
	"bpf":                     {},
	"bpf/bpftest":             {},
	"pkg/intercept/cgroupbpf": {"bpf", "pkg/intercept", "pkg/rules", "pkg/dial", "pkg/observe"},
	"pkg/intercept/nft":       {"pkg/intercept", "pkg/rules", "pkg/dial", "pkg/observe"},
	"pkg/intercept/listen":    {"pkg/intercept", "pkg/rules", "pkg/dial", "pkg/observe"},
	"pkg/intercept/iptables": {
		"pkg/intercept", "pkg/rules", "pkg/dial", "pkg/observe",
	},
	"pkg/intercept/tproxy": {
		"pkg/intercept", "pkg/intercept/nft", "pkg/intercept/iptables", "pkg/rules", "pkg/dial", "pkg/observe",
	},
	"pkg/intercept/intercepttest": {
		"pkg/intercept", "pkg/rules", "pkg/dial", "pkg/observe", "pkg/access", "tests/netns", "tests/netns/kas",
	},
	"pkg/agent":        {"pkg/config", "pkg/intercept", "pkg/rules", "pkg/dial", "pkg/observe", "pkg/workload"},
	"pkg/server":       {"pkg/config", "pkg/dial", "pkg/observe", "pkg/tunnel", "pkg/access", "pkg/upstream", "pkg/certs"},
	"cmd/internal/cli": {"pkg/config", "pkg/intercept", "pkg/observe"},
	"cmd/agent":        {"pkg", "cmd"},
	"cmd/server":       {"pkg", "cmd"},
	"tests":            {"pkg", "tests"},
	"hack":             {"hack"},
}

// Budgets in lines; generated files are exempt.
const (
	maxFile     = 400
	maxFunction = 60
)

type pkg struct {
	ImportPath, Dir, Doc string
	GoFiles, Imports     []string
}

func list(t *testing.T) []pkg {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,Doc,GoFiles,Imports", module+"...")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.Bytes())
	}
	var all []pkg
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p pkg
		if err := dec.Decode(&p); err == io.EOF {
			return all
		} else if err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
}

// check returns what is wrong with the imports of one package.
func check(p pkg) []string {
	name := strings.TrimPrefix(p.ImportPath, module)
	key, ok := name, false
	for {
		if _, ok = allowed[key]; ok {
			break
		}
		if key = filepath.Dir(key); key == "." {
			return []string{name + " is not in the table of arrows"}
		}
		// Only the trees of commands, tests and tools are open to new folders.
		if !slices.Contains([]string{"tests", "hack"}, strings.Split(key, "/")[0]) {
			return []string{name + " is not in the table of arrows"}
		}
	}
	var wrong []string
	for _, i := range p.Imports {
		to, ours := strings.CutPrefix(i, module)
		if !ours || slices.ContainsFunc(allowed[key], func(a string) bool { return to == a || openTree(a) && strings.HasPrefix(to, a+"/") }) {
			continue
		}
		wrong = append(wrong, fmt.Sprintf("%s imports %s, which is not allowed", name, to))
	}
	if p.Doc == "" {
		wrong = append(wrong, name+" has no package comment")
	}
	return wrong
}

func openTree(a string) bool { return a == "pkg" || a == "cmd" || a == "tests" || a == "hack" }

func TestArrows(t *testing.T) {
	for _, p := range list(t) {
		for _, w := range check(p) {
			t.Error(w)
		}
	}
}

func TestArrowsAreChecked(t *testing.T) {
	bad := []pkg{
		{ImportPath: module + "pkg/intercept", Doc: "x", Imports: []string{module + "pkg/intercept/nft"}},
		{ImportPath: module + "pkg/tunnel", Doc: "x", Imports: []string{module + "pkg/access"}},
		{ImportPath: module + "pkg/agent", Doc: "x", Imports: []string{module + "pkg/tunnel"}},
		{ImportPath: module + "pkg/new", Doc: "x"},
		{ImportPath: module + "pkg/dial"},
	}
	for _, p := range bad {
		if len(check(p)) == 0 {
			t.Errorf("%+v passes", p)
		}
	}
}

func TestBudgets(t *testing.T) {
	for _, p := range list(t) {
		for _, f := range p.GoFiles {
			fset := token.NewFileSet()
			file, err := parser.ParseFile(fset, filepath.Join(p.Dir, f), nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if ast.IsGenerated(file) {
				continue
			}
			if n := fset.File(file.Pos()).LineCount(); n > maxFile {
				t.Errorf("%s: %d lines, the budget is %d", filepath.Join(p.ImportPath, f), n, maxFile)
			}
			for _, d := range file.Decls {
				budget(t, fset, d)
			}
		}
	}
}

// budget checks one declaration: the length of a function, and that what is
// exported says what it is.
func budget(t *testing.T, fset *token.FileSet, d ast.Decl) {
	t.Helper()
	switch d := d.(type) {
	case *ast.FuncDecl:
		pos := fset.Position(d.Pos())
		if n := fset.Position(d.End()).Line - pos.Line + 1; n > maxFunction {
			t.Errorf("%s: %s has %d lines, the budget is %d", pos, d.Name.Name, n, maxFunction)
		}
		if d.Name.IsExported() && d.Doc == nil && exportedReceiver(d) {
			t.Errorf("%s: exported %s has no comment", pos, d.Name.Name)
		}
	case *ast.GenDecl:
		for _, s := range d.Specs {
			if ts, ok := s.(*ast.TypeSpec); ok && ts.Name.IsExported() && d.Doc == nil && ts.Doc == nil && ts.Comment == nil {
				t.Errorf("%s: exported type %s has no comment", fset.Position(ts.Pos()), ts.Name.Name)
			}
		}
	}
}

// exportedReceiver is false for methods of unexported types, and for the few
// that an interface of the standard library explains.
func exportedReceiver(d *ast.FuncDecl) bool {
	if slices.Contains([]string{"Error", "Unwrap", "String", "Is"}, d.Name.Name) {
		return false
	}
	if d.Recv == nil {
		return true
	}
	e := d.Recv.List[0].Type
	if s, ok := e.(*ast.StarExpr); ok {
		e = s.X
	}
	id, ok := e.(*ast.Ident)
	return ok && id.IsExported()
}
