//! The configs that ship with the program.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};

use train::config::Plan;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn configs() -> Vec<PathBuf> {
    let entries = fs::read_dir(root().join("configs")).unwrap();
    let paths = entries.map(|entry| entry.unwrap().path());
    paths
        .filter(|path| path.extension().is_some_and(|e| e == "toml"))
        .collect()
}

#[test]
fn every_config_loads_and_is_a_run_of_its_own_name() {
    let configs = configs();
    assert!(configs.len() >= 3);
    for path in configs {
        let plan = Plan::load(&path, &[]).unwrap();
        let name = path.file_stem().unwrap().to_str().unwrap();
        assert_eq!(plan.raw().run.name, name);
    }
}

/// Cargo fetches exactly the packages of the lock file: any other version would be absent.
#[test]
fn every_package_of_data_crates_is_in_the_lock_file() {
    let lock = fs::read_to_string(root().join("Cargo.lock")).unwrap();
    let lock: toml::Table = toml::from_str(&lock).unwrap();
    let packages = lock["package"].as_array().unwrap();
    let text = |package: &toml::Value, key: &str| package[key].as_str().unwrap().to_owned();
    let locked: HashSet<String> = packages
        .iter()
        .map(|package| format!("{}-{}", text(package, "name"), text(package, "version")))
        .collect();
    let mut num_crates = 0;
    for path in configs() {
        for name in &Plan::load(&path, &[]).unwrap().raw().data.crates {
            assert!(locked.contains(name), "{name} of {}", path.display());
            num_crates += 1;
        }
    }
    assert!(num_crates > 0);
}
